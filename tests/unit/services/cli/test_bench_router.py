"""What `handoff bench router` makes of its measurements."""

from __future__ import annotations

from services.cli.bench_router import Result


def test_the_added_time_is_the_median_of_the_differences() -> None:
    """Each way through the router is compared with the direct one that was measured right before it."""
    result = Result(
        first_s={
            "pd": [0.005, 0.104, 0.006],
            "pd worker": [0.003, 0.100, 0.001],
            "unified": [0.002] * 3,
            "unified worker": [0.001] * 3,
        },
        tokens_per_s=[4_000.0, 6_000.0, 7_000.0],
    )

    assert 4.0 == round(result.added_ms("pd"), 6)
    assert [False, True, True] == list(result.goals.values())


def test_both_baselines_are_told() -> None:
    """What is added to prefill alone stands beside what is added to the same two calls, which has the goal."""
    times = {"pd": [0.005], "pd worker": [0.003], "prefill alone": [0.002]}
    result = Result(first_s=times | {"unified": [0.002], "unified worker": [0.001]}, tokens_per_s=[6_000.0])

    told = result.to_dict()

    assert {"pd": 2.0, "unified": 1.0} == {
        name: round(ms, 6)
        for name, ms in told["added_p50_ms"].items()  # type: ignore[attr-defined]
    }
    assert 3.0 == round(told["added_to_prefill_alone_p50_ms"], 6)  # type: ignore[call-overload]

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

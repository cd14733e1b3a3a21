"""The examination's bounds and its words."""

from __future__ import annotations

from services.cli.doctor import Budget, Plan, Report, longest_prompt, prompt_times, travels
from services.cli.doctor_checks import Clock, Finding, Seen
from services.cli.doctor_model import Line, Link, Load, Measured
from services.cli.doctor_probe import Transfers
from services.cli.doctor_tables import doctor_as_json, verdict
from shared.wire import Sent
from tests.unit.services.cli.test_doctor_checks import info, seen


def report(bytes_per_s: float, *findings: Finding) -> Report:
    """A finished examination with this bandwidth: 1 ms a prompt token, 1 KiB of KV a token."""
    plan = Plan("http://p", "http://d", "s", prompts=(50,), load=Load(101, 8), runs=2, compute_s=1)
    measured = Measured(
        local_s=Line(((100.0, 0.1),)),
        remote_s=Line(((100.0, 0.1),)),
        step_s=Line(((1.0, 0.01), (8.0, 0.01))),
        reserve_s=0.002,
        link=Link(0.005, bytes_per_s),
        bytes_per_token=1024,
        chunk_size=256,
    )
    pair: tuple[Seen, Seen] = seen("prefill"), seen("decode", Clock(1.0, 0.0, 0.0, 0.0))
    return Report(plan, list(findings), pair, measured=measured)


async def test_prompts_grow_until_the_next_would_not_fit() -> None:
    """A quarter of a second a token: after 32 of them eight seconds are gone, and 128 would take half a minute."""

    async def measure(num_tokens: int) -> float:
        return num_tokens / 4

    assert [(32, 8.0)] == await prompt_times(measure, 1024, Budget(20))
    assert [32, 128, 200] == [tokens for tokens, _ in await prompt_times(measure, 200, Budget(1000))]
    assert [(5, 1.25)] == await prompt_times(measure, 5, Budget(-1))


def test_a_measurement_leaves_most_of_the_pool_to_requests() -> None:
    """A quarter of the smaller pool, and never more than a request may have."""
    assert 98 == longest_prompt(info("prefill"), info("decode"))
    assert 40 == longest_prompt(info("prefill", num_blocks=10), info("decode"))


def test_the_verdict_names_the_length() -> None:
    """Healthy, splitting pays, and what a prompt of the mix costs either way."""
    healthy, pays, sentence = verdict(report(1e9))

    assert healthy.startswith("Healthy")
    assert "Splitting pays from 2 prompt tokens on, with 8 answers of 101 tokens at a time." == pays
    assert (
        "  50 tokens: computed where others decode it stops 4 answers for 50.0 ms each (50.0 ms at once);"
        in sentence
    )
    assert sentence.endswith("It pays.")


def test_the_verdict_says_when_splitting_never_pays() -> None:
    """A link of a kilobyte a second; and a problem comes first."""
    unhealthy, never, sentence = verdict(report(1e3, Finding("memory", "problem", "little")))

    assert "NOT HEALTHY: 1 problem, see above." == unhealthy
    assert never.startswith("Splitting does not pay here, at no prompt length up to 99 tokens")
    assert sentence.endswith("It does not pay.")


def test_programs_get_the_same_facts() -> None:
    """Break-even, costs and health as JSON."""
    found = doctor_as_json(report(1e9))

    assert (True, 2) == (found["healthy"], found["break_even_tokens"])
    assert [(50, True)] == [(cost["prompt_tokens"], cost["pays"]) for cost in found["mix"]]
    assert doctor_as_json(Report(report(1e9).plan))["measured"] is None


def sent(kv_bytes: int, wire_bytes: int, transfer_s: float, kv_wire: str | None = None) -> Sent:
    """One hand-off over tcp."""
    return Sent(
        transport="tcp",
        kv_bytes=kv_bytes,
        wire_bytes=wire_bytes,
        transfer_s=transfer_s,
        hidden_s=0,
        kv_wire=kv_wire,
    )


def test_bandwidth_counts_kv_as_it_is_in_the_pool() -> None:
    """A quarter of the bytes on the way is four times the bandwidth, so that what a token costs is right."""
    runs = {1000: [(9.0, 1000), (1.0, 250)], 5000: [(9.0, 5000), (2.0, 1250)]}
    exact = Transfers("tcp", {size: [sent(size, size, s) for s, _ in each] for size, each in runs.items()})
    int8 = Transfers(
        "tcp", {size: [sent(size, wire, s / 4, "int8") for s, wire in each] for size, each in runs.items()}
    )

    assert (Link(0.75, 4000.0), Link(0.1875, 16000.0)) == (exact.link, int8.link)
    assert [(1000, 0.25), (5000, 0.5)] == int8.medians()
    assert exact.largest is not None
    assert int8.largest is not None
    assert ("exact", "as int8, 25% of its bytes") == (travels(exact.largest), travels(int8.largest))
    assert (None, None) == (Transfers("shm", {}, "no").link, Transfers("shm", {}, "no").largest)

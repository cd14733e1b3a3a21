"""The arithmetic of `handoff doctor`: what splitting costs, what not splitting costs, and where they meet."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.doctor_model import (
    Line,
    Link,
    Load,
    Measured,
    break_even,
    costs,
    exposed_s,
    line,
    requests_per_s,
)

# 1 ms a prompt token, 10 ms a decode step whatever is in it, 1 KiB of KV a token over 1 MiB/s and 5 ms.
PER_TOKEN = Line(((1.0, 0.001), (1000.0, 1.0)))
MEASURED = Measured(
    local_s=PER_TOKEN,
    remote_s=PER_TOKEN,
    step_s=Line(((1.0, 0.01), (8.0, 0.01))),
    reserve_s=0.002,
    link=Link(fixed_s=0.005, bytes_per_s=1 << 20),
    bytes_per_token=1024,
    chunk_size=100,
)
LOAD = Load(output_tokens=101, running=8)


def with_link(bytes_per_s: float) -> Measured:
    """The same over a faster or slower link."""
    return Measured(**{**vars(MEASURED), "link": Link(0.005, bytes_per_s)})


def test_a_link_is_a_fixed_cost_and_a_bandwidth() -> None:
    """Through the smallest and the largest size; a size between them changes nothing."""
    link = Link.through([(1_001_000, 0.102), (1_000, 0.002), (500_000, 9.0)])

    assert pytest.approx(10_000_000.0) == link.bytes_per_s
    assert pytest.approx(0.0019) == link.fixed_s


def test_a_link_whose_times_are_noise_has_no_negative_cost() -> None:
    """A larger hand-off that was quicker shows the least bandwidth that there is: none is boundless."""
    link = Link.through([(1_000, 0.002), (2_000, 0.001)])

    assert 0.001 == link.fixed_s
    assert pytest.approx(2_000_000.0) == link.bytes_per_s


def test_a_line_goes_through_its_points_and_beyond() -> None:
    """Straight between them, with the last slope behind them, in proportion if there is one point only."""
    through = line([(100, 1.0), (300, 2.0), (200, 0.5)])

    assert Line(((100, 1.0), (200, 1.0), (300, 2.0))) == through
    assert [0.0, 1.0, 1.5, 3.0] == [
        Line(((1, 0.0), (2, 1.0), (3, 1.5), (4, 3.0))).at(x) for x in (1, 2, 3, 4)
    ]
    assert pytest.approx(4.0) == through.at(500)
    assert pytest.approx(2.0) == line([(50, 1.0)]).at(100)


def test_only_the_last_chunk_is_exposed_on_a_fast_link() -> None:
    """Earlier chunks travel while later ones are computed."""
    assert pytest.approx(0.005 + 100 / 1024) == exposed_s(MEASURED, 100)
    assert pytest.approx(0.005 + 100 / 1024) == exposed_s(MEASURED, 1000)


def test_a_slow_link_falls_behind_compute() -> None:
    """KV waits for KV: what is exposed is the whole transfer less what fitted behind compute."""
    # 0.2 s a chunk on the link, 0.1 s to compute it: the first one is ready after 0.1 s.
    slow = with_link(512 * 1000)

    assert pytest.approx(0.005 + 0.1 + 10 * 0.2 - 1.0) == exposed_s(slow, 1000)


@given(num_tokens=st.integers(1, 5000), bytes_per_s=st.floats(1e3, 1e12))
def test_exposed_transfer_lies_between_one_chunk_and_everything(num_tokens: int, bytes_per_s: float) -> None:
    """Whatever the link: never less than the last chunk, never more than nothing hidden."""
    measured = with_link(bytes_per_s)
    last = (num_tokens - 1) % 100 + 1
    per_token_s = measured.bytes_per_token / bytes_per_s

    found = exposed_s(measured, num_tokens)

    assert found >= (0.005 + last * per_token_s) * (1 - 1e-6) - 1e-9
    assert found <= (0.005 + num_tokens * per_token_s) * (1 + 1e-6) + 1e-9


def test_costs_count_what_others_lose_and_what_the_request_loses() -> None:
    """Without a split four of eight answers stand still; with it, one request waits for its transfer."""
    cost = costs(MEASURED, LOAD, 200)

    assert pytest.approx(0.2) == cost.stall_s
    assert pytest.approx(0.1) == cost.pause_s
    assert pytest.approx(4 * 0.2) == cost.unified_s
    assert pytest.approx(0.002 + 0.005 + 100 / 1024) == cost.split_s
    assert cost.pays


def test_steps_that_grow_with_the_answers_in_them_count_against_splitting() -> None:
    """One decode worker holds all eight: each of the answer's 100 steps takes what 8 take, not what 4 take."""
    growing = Measured(**{**vars(MEASURED), "step_s": Line(((1.0, 0.01), (8.0, 0.08)))})

    assert pytest.approx(100 * 0.04) == costs(growing, LOAD, 200).split_s - costs(MEASURED, LOAD, 200).split_s


def test_break_even_is_the_first_length_that_pays() -> None:
    """One token less does not; and there may be none at all, or every length."""
    shortest = break_even(MEASURED, Load(101, 1), 100_000)
    assert shortest is not None
    assert [False, True] == [costs(MEASURED, Load(101, 1), n).pays for n in (shortest - 1, shortest)]
    assert None is break_even(with_link(1000.0), Load(101, 1), 100_000)
    assert 1 == break_even(with_link(1e12), Load(101, 64), 100_000)


def test_more_answers_at_a_time_lower_the_break_even() -> None:
    """The more wait for a prompt, the shorter it may be."""
    few, many = (break_even(MEASURED, Load(101, running), 10_000) for running in (1, 8))

    assert few is not None
    assert many is not None
    assert many <= few


def test_throughput_is_that_of_the_busier_worker() -> None:
    """Split: prefill at 0.2 s a prompt against decode at 100 steps for 8. Two unified: both things on each."""
    split, unified = requests_per_s(MEASURED, LOAD, 200)

    assert pytest.approx(1 / 0.2) == split
    assert pytest.approx(2 / (0.2 + 100 * 0.01 / 4)) == unified

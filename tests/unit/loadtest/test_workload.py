"""Workloads are functions of their seed: lengths exact, prompts different, equal blocks equal."""

from __future__ import annotations

from itertools import islice, pairwise
from statistics import fmean

import pytest

from loadtest.client import Request
from loadtest.traces import Scale, TraceRow
from loadtest.workload import poisson, random_ids, random_words, replay, synthetic


def test_prompts_have_their_length_and_differ() -> None:
    """Exactly as many ids as asked for, in range, no two prompts alike, and the same again for the same seed."""
    first = list(islice(synthetic(prompt_tokens=128, max_tokens=8), 50))
    again = list(islice(synthetic(prompt_tokens=128, max_tokens=8), 50))
    other = list(islice(synthetic(prompt_tokens=128, max_tokens=8, seed=1), 50))
    assert first == again
    assert len({request.prompt for request in first + other}) == 100
    assert {128} == {len(request.prompt) for request in first}
    assert all(token in range(256) for request in first for token in request.prompt)


def test_prompts_differ_from_their_first_block_on() -> None:
    """A shared first block would be a prefix cache hit."""
    heads = [request.prompt[:16] for request in islice(synthetic(prompt_tokens=64, max_tokens=1), 100)]
    assert len(set(heads)) == 100


def test_words_and_chat() -> None:
    """Chat prompts are text of as many words as tokens are wanted."""
    request = next(synthetic(prompt_tokens=20, max_tokens=1, chat=True))
    assert request.chat
    assert isinstance(request.prompt, str)
    assert len(request.prompt.split()) == 20
    assert random_words(5, "a") != random_words(5, "b")


def test_poisson_has_its_rate_and_its_seed() -> None:
    """Gaps are positive and average to 1 / rate; another seed gives other times."""
    requests = [Request((1,), 1)] * 5000
    due_s = [item.due_s for item in poisson(requests, rate_per_s=20.0, seed=3)]
    gaps_s = [b - a for a, b in pairwise([0.0, *due_s])]
    assert fmean(gaps_s) == pytest.approx(1 / 20, rel=0.1)
    assert min(gaps_s) > 0
    assert due_s == [item.due_s for item in poisson(requests, rate_per_s=20.0, seed=3)]
    assert due_s != [item.due_s for item in poisson(requests, rate_per_s=20.0, seed=4)]


def test_a_rate_is_positive() -> None:
    """Rate 0 would never send."""
    with pytest.raises(ValueError, match="positive"):
        next(poisson([Request((1,), 1)], rate_per_s=0.0))


def test_equal_blocks_are_equal_tokens() -> None:
    """Two prompts share exactly the tokens of their shared leading blocks; the scale that came out is told."""
    rows = [
        TraceRow(0.0, 1300, 100, (0, 1, 2)),
        TraceRow(8.0, 1024, 50, (0, 9)),
        TraceRow(9.0, 1300, 1, (0, 1, 2)),
    ]
    plan = replay(rows, Scale(time=0.5, length=1 / 32))
    one, two, three = (item.request.prompt for item in plan.requests)
    assert [item.due_s for item in plan.requests] == [0.0, 4.0, 4.5]
    assert (len(one), len(two)) == (2 * 16 + 9, 32)
    assert one[:16] == two[:16]
    assert one[16:32] != two[16:32]
    assert one == three
    assert plan.to_dict()["prompt_tokens_ratio"] == pytest.approx((41 + 32 + 41) / 3624, abs=1e-5)


def test_rows_without_blocks_never_share() -> None:
    """Where a trace tells nothing about prefixes, none is made up."""
    plan = replay([TraceRow(0.0, 64, 1)] * 20, Scale())
    assert len({item.request.prompt for item in plan.requests}) == 20


def test_ids_are_drawn_from_the_given_range() -> None:
    """Other vocabularies can be named."""
    assert set(random_ids(200, "x", range(1000, 1010))) == set(range(1000, 1010))

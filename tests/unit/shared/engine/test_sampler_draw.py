"""Which token is drawn: greedy, filtered and random."""

from __future__ import annotations

import itertools
import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.sampler import sample, uniform
from shared.errors import EngineFault
from shared.wire import Sampling
from tests.unit.shared.engine.sampling import draw, logits, naive_probabilities, token

NUM_DRAWS = 2000
CHI_SQUARE_1E_4 = {1: 15.14, 2: 18.42, 3: 21.11, 4: 23.51, 5: 25.74, 6: 27.86, 7: 29.88, 8: 31.83, 9: 33.72}
"""Quantile 0.9999 by degrees of freedom."""


@pytest.mark.parametrize("temperature", [0.0, 1e-30, 1e-9, 1e-6, 1e-5, 1e-4, 1e-3])
def test_tiny_temperatures_are_greedy(temperature: float) -> None:
    """There is no band of small temperatures with another answer than temperature 0."""
    for seed in range(30):
        values = logits(seed, spread=20.0)
        assert int(values.argmax()) == token(values, temperature=temperature, seed=seed)


def test_temperature_0_is_greedy_whatever_else_is_set() -> None:
    """Filters and seed do not matter then."""
    values = logits(0)
    options: dict[str, Any] = {"top_p": 0.1, "top_k": 5, "min_p": 0.5, "seed": 3}
    assert int(values.argmax()) == token(values, temperature=0.0, **options)


@pytest.mark.parametrize("options", [{"top_p": 0.0}, {"top_p": 1e-4}, {"top_k": 1}, {"min_p": 1.0}])
def test_filters_that_leave_one_token_are_greedy(options: dict[str, Any]) -> None:
    """Even at a high temperature, at every position."""
    values = logits(1)
    drawn = {token(values, temperature=2.0, prompt=range(n), **options) for n in range(1, 40)}
    assert {int(values.argmax())} == drawn


@settings(max_examples=40, deadline=None, derandomize=True)
@given(
    seed=st.integers(0, 10_000),
    vocab_size=st.sampled_from([2, 7, 50, 700]),
    temperature=st.sampled_from([0.3, 1.0, 1.7, 20.0]),
    top_k=st.sampled_from([0, 2, 5, 10_000]),
    top_p=st.sampled_from([0.05, 0.5, 0.9, 0.999, 1.0]),
    min_p=st.sampled_from([0.0, 0.01, 0.3, 0.9]),
)
def test_only_tokens_that_the_filters_leave_are_drawn(
    seed: int, vocab_size: int, temperature: float, top_k: int, top_p: float, min_p: float
) -> None:
    """Every draw follows the inverse of the naive distribution, cut for cut (700 tokens: past the first try)."""
    values = logits(seed, vocab_size)
    wanted = naive_probabilities(values, temperature=temperature, top_k=top_k, top_p=top_p, min_p=min_p)
    filters: dict[str, Any] = {
        "temperature": temperature,
        "top_k": top_k,
        "top_p": top_p,
        "min_p": min_p,
        "seed": seed,
    }
    drawn = {token(values, prompt=range(n), **filters) for n in range(1, 30)}
    assert all(float(wanted[t]) > 0 for t in drawn)
    if int((wanted > 0).sum()) == 1:
        assert {int(wanted.argmax())} == drawn


@pytest.mark.parametrize(
    "filters",
    [
        {},
        {"temperature": 0.5},
        {"temperature": 3.0},
        {"top_k": 4},
        {"top_p": 0.8},
        {"min_p": 0.1},
        {"top_k": 6, "top_p": 0.9, "min_p": 0.02, "temperature": 1.5},
    ],
    ids=str,
)
def test_draws_are_distributed_as_asked(filters: dict[str, Any]) -> None:
    """Over many positions the counts fit the naive distribution (chi-square at 1e-4, fixed seed)."""
    values = logits(5, vocab_size=10, spread=1.0)
    wanted = naive_probabilities(values, **filters)
    sampling = Sampling.model_validate({"max_tokens": NUM_DRAWS, "seed": 17, **filters})
    counts = torch.zeros(10)
    for position in range(NUM_DRAWS):
        drawn, _ = sample(values, sampling, choice=0, prompt=range(position), outputs=(), banned=())
        counts[drawn] += 1
    possible = wanted > 0
    assert 0 == int(counts[~possible].sum())
    expected = wanted[possible] * NUM_DRAWS
    statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
    assert statistic < CHI_SQUARE_1E_4[int(possible.sum()) - 1]


@pytest.mark.parametrize("filters", [{"top_p": 0.99}, {"min_p": 0.5}, {"top_p": 0.99, "min_p": 0.5}], ids=str)
def test_a_wide_choice_is_not_cut_short(filters: dict[str, Any]) -> None:
    """A flat distribution keeps all of its tokens, however many the sampler looks at first."""
    values = logits(0, vocab_size=2000, spread=0.01)
    ranks = values.argsort(descending=True).argsort()
    drawn = [int(ranks[token(values, prompt=range(n), **filters)]) for n in range(1, 60)]
    assert max(drawn) > 1500


def test_a_token_depends_on_seed_choice_and_position_only() -> None:
    """The split of the sequence into prompt and output does not matter; each of the three keys does."""
    values = logits(2, spread=0.5)
    drawn = [token(values, prompt=range(n), outputs=range(20 - n), seed=4) for n in range(1, 20)]
    assert 1 == len(set(drawn))
    assert len({token(values, seed=seed) for seed in range(40)}) > 10
    assert len({token(values, choice=choice) for choice in range(40)}) > 10
    assert len({token(values, prompt=range(n)) for n in range(40)}) > 10


def test_neighbours_in_a_batch_do_not_matter() -> None:
    """A row of a batch gives the token and logprobs that it gives alone, and is left as it was."""
    batch = torch.stack([logits(seed) for seed in range(8)])
    before = batch.clone()
    options: dict[str, Any] = {"seed": 9, "num_logprobs": 3, "top_p": 0.9}
    together = [draw(row, **options, repetition_penalty=2.0 if i % 2 else 1.0) for i, row in enumerate(batch)]
    alone = [draw(before[i].clone(), **options, repetition_penalty=2.0 if i % 2 else 1.0) for i in range(8)]
    assert alone == together
    assert torch.equal(before, batch)


@pytest.mark.parametrize("bad", [math.nan, math.inf])
@pytest.mark.parametrize(
    "options",
    [{"temperature": 0.0}, {"temperature": 1.0}, {"top_k": 3}, {"top_p": 0.5}, {"min_p": 0.1}],
    ids=str,
)
@pytest.mark.parametrize("place", [0, 20, 49])
def test_logits_that_are_not_numbers_are_a_fault(bad: float, options: dict[str, Any], place: int) -> None:
    """One NaN or infinity anywhere is found, greedy or not: no token comes from broken logits."""
    values = logits(3)
    values[place] = bad
    with pytest.raises(EngineFault, match="not numbers"):
        token(values, **options)


def test_logits_without_any_possible_token_are_a_fault() -> None:
    """All minus infinity is no distribution."""
    for temperature in (0.0, 1.0):
        with pytest.raises(EngineFault):
            token(torch.full((10,), -math.inf), temperature=temperature)


def test_impossible_tokens_are_never_drawn() -> None:
    """Minus infinity is allowed for single tokens, as logits processors make it."""
    values = torch.full((10,), -math.inf)
    values[3] = values[8] = 0.0
    assert {3, 8} == {token(values, prompt=range(n), temperature=5.0) for n in range(1, 60)}


def test_uniform_covers_its_range_evenly() -> None:
    """Values lie in [0, 1), all deciles are equally full, and mean and variance fit."""
    values = [uniform(seed, 0, position) for seed in range(20) for position in range(500)]
    assert all(0 <= v < 1 for v in values)
    deciles = [sum(int(v * 10) == d for v in values) for d in range(10)]
    assert sum((n - 1000) ** 2 / 1000 for n in deciles) < CHI_SQUARE_1E_4[9]
    mean = sum(values) / len(values)
    assert 0.5 == pytest.approx(mean, abs=0.01)
    assert 1 / 12 == pytest.approx(sum((v - mean) ** 2 for v in values) / len(values), abs=0.005)


@pytest.mark.parametrize("step", [(1, 0, 0), (0, 1, 0), (0, 0, 1)], ids=["seed", "choice", "position"])
def test_neighbouring_draws_are_independent(step: tuple[int, int, int]) -> None:
    """No correlation along seed, choice or position."""
    pairs = []
    for i, j, k in itertools.product(range(12), repeat=3):
        other = (i + step[0], j + step[1], k + step[2])
        pairs.append((uniform(i, j, k), uniform(*other)))
    covariance = sum((a - 0.5) * (b - 0.5) for a, b in pairs) / len(pairs)
    assert 0 == pytest.approx(covariance * 12, abs=4 / math.sqrt(len(pairs)))


def test_uniform_takes_the_whole_range_of_its_keys() -> None:
    """The largest seed works, and swapping keys is another draw."""
    assert 0 <= uniform(2**64 - 1, 128, 2**31) < 1
    assert uniform(1, 2, 3) != uniform(3, 2, 1) != uniform(2, 1, 3)

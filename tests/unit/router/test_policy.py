"""Placement among candidates that are all usable."""

from __future__ import annotations

from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from router.policy import LeastOutstanding
from shared.wire import Fingerprint


def fingerprint(dtype: str = "float32") -> Fingerprint:
    """One that differs in dtype only."""
    return Fingerprint(
        weights="w", config="c", tokenizer="t", dtype=dtype, layout="l", rope="r",
        num_layers=1, num_kv_heads=1, head_dim=8,
    )  # fmt: skip


@dataclass(frozen=True)
class Worker:
    """A candidate."""

    url: str
    outstanding_tokens: int = 0
    dtype: str = "float32"

    @property
    def fingerprint(self) -> Fingerprint:
        """By dtype."""
        return fingerprint(self.dtype)


def test_takes_the_least_loaded() -> None:
    """The fewest outstanding tokens win, on each side by itself."""
    prefill = [Worker("p0", 5), Worker("p1", 3)]
    decode = [Worker("d0", 1), Worker("d1", 2)]
    policy: LeastOutstanding[Worker] = LeastOutstanding()
    assert (prefill[1], decode[0]) == policy.pair(prefill, decode)
    assert prefill[1] == policy.one(prefill)


def test_equal_ones_take_turns() -> None:
    """Among equals each is taken equally often."""
    workers = [Worker("a"), Worker("b"), Worker("c")]
    policy: LeastOutstanding[Worker] = LeastOutstanding()
    chosen = [policy.one(workers) for _ in range(9)]
    assert [3, 3, 3] == [chosen.count(w) for w in workers]


def test_avoided_ones_are_the_last_resort() -> None:
    """A worker that failed is taken only when there is no other; one that refused, never."""
    a, b = Worker("a"), Worker("b", 100)
    policy: LeastOutstanding[Worker] = LeastOutstanding()
    assert b == policy.one([a, b], avoid={"a"})
    assert a == policy.one([a], avoid={"a"})
    assert policy.one([a], exclude={"a"}) is None


def test_never_pairs_different_fingerprints() -> None:
    """A busier pair that fits wins over an idle one that does not; no fitting pair is None."""
    policy: LeastOutstanding[Worker] = LeastOutstanding()
    odd, fitting = Worker("d0", 0, "bfloat16"), Worker("d1", 900)
    prefill = Worker("p0")
    assert (prefill, fitting) == policy.pair([prefill], [odd, fitting])
    assert policy.pair([prefill], [odd]) is None
    assert policy.one([odd], like=prefill) is None


@given(
    loads=st.lists(st.integers(0, 5), min_size=1, max_size=6),
    avoided=st.sets(st.integers(0, 5)),
    turns=st.integers(0, 10),
)
def test_choice_is_minimal(loads: list[int], avoided: set[int], turns: int) -> None:
    """Whatever the turn, nothing better than the chosen one exists."""
    workers = [Worker(str(i), load) for i, load in enumerate(loads)]
    policy: LeastOutstanding[Worker] = LeastOutstanding()
    for _ in range(turns):
        policy.one(workers)
    avoid = {str(i) for i in avoided}
    chosen = policy.one(workers, avoid=avoid)
    assert chosen is not None
    assert min((w.url in avoid, w.outstanding_tokens) for w in workers) == (
        chosen.url in avoid,
        chosen.outstanding_tokens,
    )

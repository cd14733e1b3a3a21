"""The scheduler under random traffic, with cancels, deadlines and stops at any step."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from shared.engine.sequence import Mode, State
from tests.unit.shared.engine.helpers import make_limits
from tests.unit.shared.engine.simulation import VOCAB, Simulation

# Prompts of two token ids, cut from few beginnings, so that they often share their prefix.
PROMPTS = st.builds(
    lambda start, length, tail: ([start, 1, 2, 1] * 8)[:length] + tail,
    st.integers(0, 1),
    st.integers(1, 24),
    st.lists(st.integers(0, VOCAB - 1), max_size=3),
)
ARRIVE = st.tuples(
    st.just("arrive"),
    PROMPTS,
    st.sampled_from(Mode),
    st.integers(1, 4),
    st.integers(1, 9),
    st.integers(1, 60),
)
OTHER = st.tuples(
    st.sampled_from(["step", "step", "step", "receive", "release", "cancel", "stop"]), st.integers(0, 30)
)


def _act(sim: Simulation, action: tuple[object, ...]) -> None:
    match action:
        case ("arrive", list() as prompt, Mode() as mode, int(n), int(max_tokens), int(ttl)):
            sim.arrive(prompt, mode, n, max_tokens, ttl)
        case ("step", _):
            sim.now += 1
            sim.step()
        case (str(name), int(pick)) if sim.requests:
            request = sim.requests[pick % len(sim.requests)]
            if name == "receive":
                sim.receive(request)
            elif name == "release":
                sim.release(request)
            elif name == "cancel":
                sim.scheduler.end(request.group)
            elif name == "stop":
                sim.stop(request, pick % 4)


@settings(max_examples=120, deadline=None, derandomize=True)
@given(
    num_blocks=st.integers(1, 40),
    block_size=st.sampled_from([1, 2, 4, 16]),
    chunk_size=st.sampled_from([0, 1, 3, 8]),
    max_num_seqs=st.integers(1, 8),
    actions=st.lists(st.one_of(ARRIVE, OTHER, OTHER), max_size=50),
    seed=st.integers(0, 1000),
)
def test_random_traffic_keeps_every_promise(
    num_blocks: int,
    block_size: int,
    chunk_size: int,
    max_num_seqs: int,
    actions: list[tuple[object, ...]],
    seed: int,
) -> None:
    """KV that is read is right, KV that is written is private, order is kept, and at the end nothing is owned."""
    limits = make_limits(chunk_size=chunk_size, max_num_seqs=max_num_seqs, vocab_size=VOCAB)
    sim = Simulation(num_blocks, block_size, limits, seed)
    for action in actions:
        _act(sim, action)
        sim.check()
    for request in sim.requests:
        sim.release(request)
        sim.check()
    counts = sim.pool.counts()
    assert (0, 0, counts.allocated) == (counts.live, counts.promised, counts.freed)
    assert not sim.scheduler.waiting
    assert not sim.scheduler.active


@settings(max_examples=60, deadline=None, derandomize=True)
@given(
    num_blocks=st.integers(8, 30),
    block_size=st.sampled_from([1, 4, 16]),
    chunk_size=st.sampled_from([0, 1, 5]),
    arrivals=st.lists(ARRIVE, min_size=1, max_size=8),
)
def test_traffic_that_is_let_alone_is_served_to_the_end(
    num_blocks: int, block_size: int, chunk_size: int, arrivals: list[tuple[object, ...]]
) -> None:
    """Without deadlines no request starves: each ends, or holds its prompt, in a bounded number of steps."""
    sim = Simulation(num_blocks, block_size, make_limits(chunk_size=chunk_size, vocab_size=VOCAB), seed=0)
    for arrival in arrivals:
        _act(sim, (*arrival[:-1], 10_000))
    num_steps = 0
    while not all(r.was_released for r in sim.requests):
        sim.step()
        sim.check()
        for request in sim.requests:
            sim.receive(request)
            if request.group.state in (State.HELD, State.ENDED) and not request.was_released:
                sim.release(request)
        num_steps += 1
        assert num_steps < 600
    assert 0 == sim.pool.counts().live

"""The engine when a step fails, is abandoned or hangs, and when it is closed."""

from __future__ import annotations

import threading

import pytest
import torch
from torch import Tensor

from shared.engine.attention import StepAbandoned
from shared.engine.blocks import BlockPool
from shared.engine.engine import Engine
from shared.engine.sequence import Admitted, Mode
from shared.engine.step import Chunk, Step
from shared.errors import EngineFault, Overloaded
from shared.kv.progress import Progress
from shared.wire import First
from tests.unit.shared.engine.conftest import MakeEngine
from tests.unit.shared.engine.helpers import (
    VOCAB,
    WAIT_S,
    Client,
    CountingRunner,
    GatedRunner,
    make_limits,
    make_work,
    settle,
    tokens_of,
)

NEVER_HUNG = 1e6


class NanRunner(CountingRunner):
    """Prompts of one token get logits that are not numbers."""

    def run(self, step: Step) -> Tensor:
        logits = super().run(step)
        for row, chunk in enumerate(c for c in step.chunks if c.is_last):
            if chunk.end == 1:
                logits[len(step.decodes) + row] = torch.nan
        return logits


def _run(engine: Engine, *clients: Client) -> list[dict[int, list[int]]]:
    for client in clients:
        engine.submit(client.group)
    made = [tokens_of(client.rest()) for client in clients]
    for client in clients:
        engine.release(client.group)
    return made


def test_a_failing_step_ends_its_groups_only_and_is_reported(make_engine: MakeEngine) -> None:
    """A request that waits is served afterwards; the process is told and says why it is not ready."""
    runner = GatedRunner()
    engine = make_engine(runner, max_num_seqs=2)
    told = threading.Event()
    engine.on_broken(told.set)
    hit = [Client(make_work([1])), Client(make_work([2, 3]))]
    spared = Client(make_work([4, 5, 6], num_choices=2, max_tokens=2))
    engine.submit(hit[0].group)
    runner.step()
    engine.submit(hit[1].group)
    engine.submit(spared.group)
    runner.go()
    assert {hit[0].group, hit[1].group} == set(runner.step().groups)
    assert engine.problem(NEVER_HUNG) is None
    runner.go(RuntimeError("device lost"))
    for client in hit:
        assert EngineFault is type(client.error())
        engine.release(client.group)
    assert told.wait(WAIT_S)
    assert "a step of the engine failed" == engine.problem(NEVER_HUNG)
    assert engine.is_broken
    runner.open()
    assert {0: [3, 4], 1: [3, 4]} == tokens_of(spared.rest())
    engine.release(spared.group)
    assert 1 == engine.counts.faults


def test_a_broken_engine_says_so_once(make_engine: MakeEngine) -> None:
    """A second call used to be a second SIGTERM, which cuts every request that still runs."""
    runner = GatedRunner()
    engine = make_engine(runner, max_num_seqs=1)
    calls: list[None] = []
    engine.on_broken(lambda: calls.append(None))
    clients = [Client(make_work([token])) for token in (1, 2)]
    for client in clients:
        engine.submit(client.group)
    for client in clients:
        runner.step()
        runner.go(RuntimeError("device lost"))
        assert EngineFault is type(client.error())
        engine.release(client.group)
    runner.open()
    assert 2 == engine.counts.faults
    assert 1 == len(calls)


class OnceNanRunner(CountingRunner):
    """The logits of one step are not numbers, as if something had damaged the KV."""

    def __init__(self, bad_step: int) -> None:
        self._until = bad_step

    def run(self, step: Step) -> Tensor:
        self._until -= 1
        return torch.full((1, VOCAB), torch.nan) if not self._until else super().run(step)


@pytest.mark.parametrize("bad_step", [1, 5])
def test_nobody_finds_the_blocks_of_a_request_that_the_engine_failed_on(
    make_engine: MakeEngine, bad_step: int
) -> None:
    """Damaged KV used to stay in the prefix cache, and every request that began alike failed too."""
    engine = make_engine(OnceNanRunner(bad_step))
    failing, later = (Client(make_work(list(range(1, 10)), max_tokens=9)) for _ in range(2))
    engine.submit(failing.group)
    assert EngineFault is type(failing.error())
    engine.release(failing.group)
    engine.submit(later.group)
    assert 0 == later.take(Admitted).cached_tokens
    assert 9 == len(tokens_of(later.rest())[0])
    engine.release(later.group)


@pytest.mark.parametrize("error", [torch.OutOfMemoryError("2 GiB"), MemoryError()], ids=type)
def test_running_out_of_memory_is_overload_and_breaks_nothing(
    make_engine: MakeEngine, error: BaseException
) -> None:
    """The step's requests may be tried again, and the engine stays healthy."""
    runner = GatedRunner()
    engine = make_engine(runner)
    client = Client(make_work([1]))
    engine.submit(client.group)
    runner.step()
    runner.go(error)
    assert Overloaded is type(client.error())
    engine.release(client.group)
    runner.open()
    assert [{0: [1, 2, 3, 4]}] == _run(engine, Client(make_work([1])))
    assert engine.problem(NEVER_HUNG) is None
    assert not engine.is_broken


class GreedyRunner(CountingRunner):
    """Has no memory for the prompt that begins with 7, nor for anything beside it."""

    def run(self, step: Step) -> Tensor:
        if any(group.token_ids[0] == 7 for group in step.groups):
            raise torch.OutOfMemoryError("2 GiB")
        return super().run(step)


def test_only_who_is_too_large_alone_fails_for_want_of_memory(make_engine: MakeEngine) -> None:
    """A step that does not fit is run request by request: neighbours keep their tokens."""
    engine = make_engine(GreedyRunner(), chunk_size=64)
    small, large = Client(make_work([1, 2], num_choices=2)), Client(make_work([7, 8]))
    for client in (small, large):
        engine.submit(client.group)

    assert Overloaded is type(large.error())
    assert {0: [2, 3, 4, 5], 1: [2, 3, 4, 5]} == tokens_of(small.rest())
    for client in (small, large):
        engine.release(client.group)
    assert not engine.is_broken


class TellingRunner(GreedyRunner):
    """Tells senders of a layer of their prompts' last chunks before it runs out of memory; notes what it runs.

    Its first step lasts until `begin` is set, so that what is submitted meanwhile runs together.
    """

    def __init__(self) -> None:
        self.begin = threading.Event()
        self.ran: list[list[int]] = []

    def run(self, step: Step) -> Tensor:
        assert self.begin.wait(WAIT_S)
        self.ran.append([group.token_ids[0] for group in step.groups])
        for chunk in step.chunks:
            if chunk.is_last and chunk.group.progress is not None:
                chunk.group.progress.advance_layers(chunk.end, 1)
        return super().run(step)


def test_kv_that_is_being_sent_is_not_written_again(make_engine: MakeEngine) -> None:
    """Who was told of layers fails, retryably, and only the others are run alone.

    It used to be run again too: its KV, maybe rounded otherwise, over the one that was travelling.
    """
    runner = TellingRunner()
    engine = make_engine(runner, chunk_size=6)
    told = Client(make_work([1, 2]), Mode.PREFILL, progress=Progress(marks=(1,)))
    untold = Client(make_work([2, 3]), Mode.PREFILL, progress=Progress())
    large = Client(make_work([7, 8]))
    before = Client(make_work([5], max_tokens=1))
    engine.submit(before.group)
    before.take(Admitted)
    for client in (told, untold, large):
        engine.submit(client.group)
    runner.begin.set()

    error = told.error()
    assert (Overloaded, True) == (type(error), error.retryable)
    assert Overloaded is type(large.error())
    untold.take(Admitted)
    assert [2] == [token.token_id for token in untold.take(First).tokens]
    assert [[5], [1, 2, 7], [2], [7]] == runner.ran
    for client in (before, told, untold, large):
        engine.release(client.group)
    assert not engine.is_broken


def test_running_out_of_memory_while_sampling_is_the_same(
    make_engine: MakeEngine, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What follows the forward pass belongs to the step: it used to end the engine thread."""

    def no_memory(*_: object, **__: object) -> None:
        raise MemoryError

    engine = make_engine(CountingRunner())
    with monkeypatch.context() as patched:
        patched.setattr("shared.engine.output.sample", no_memory)
        client = Client(make_work([1]))
        engine.submit(client.group)
        assert Overloaded is type(client.error())
        engine.release(client.group)
    assert [{0: [1, 2, 3, 4]}] == _run(engine, Client(make_work([1])))


def test_logits_that_are_not_numbers_end_one_request(make_engine: MakeEngine) -> None:
    """Its neighbours in the batch go on."""
    engine = make_engine(NanRunner(), chunk_size=8)
    bad, good = Client(make_work([1], num_choices=2)), Client(make_work([1, 2], num_choices=2))
    for client in (bad, good):
        engine.submit(client.group)
    assert EngineFault is type(bad.error())
    assert {0: [2, 3, 4, 5], 1: [2, 3, 4, 5]} == tokens_of(good.rest())
    for client in (bad, good):
        engine.release(client.group)


def test_an_abandoned_step_ends_quietly(make_engine: MakeEngine) -> None:
    """Its groups were cancelled by their owners, so nobody is told, and it is no fault."""
    runner = GatedRunner()
    engine = make_engine(runner)
    client = Client(make_work(range(9)))
    engine.submit(client.group)
    step = runner.step()
    assert not step.is_abandoned
    engine.cancel(client.group)
    assert bool(step.is_abandoned)
    runner.go(StepAbandoned())
    runner.open()
    settle(engine)
    client.take(Admitted)
    assert client.events.empty()
    engine.release(client.group)
    made = _run(engine, Client(make_work(range(9))))
    assert [{0: [9, 10, 11, 12]}] == made
    assert (0, 0) == (engine.counts.faults, engine.counts.prompt_tokens_cached)


def test_a_step_is_abandoned_only_if_all_of_its_groups_are(make_engine: MakeEngine) -> None:
    """One that is still wanted keeps the step going."""
    groups = [Client(make_work([t])).group for t in (1, 2)]
    step = Step(chunks=[Chunk(group, 0, 1) for group in groups])
    groups[0].cancelled = True
    assert not step.is_abandoned
    groups[1].cancelled = True
    assert step.is_abandoned


def test_a_hung_step_is_seen_from_outside(make_engine: MakeEngine) -> None:
    """A step that takes longer than the limit makes the worker not ready, until it ends."""
    now = [0.0]
    runner = GatedRunner()
    engine = make_engine(runner, clock=lambda: now[0])
    client = Client(make_work([1], max_tokens=1), deadline=1e9)
    engine.submit(client.group)
    runner.step()
    now[0] = 120.0
    assert engine.problem(120.0) is None
    now[0] = 120.1
    assert "the engine is stuck in a step" == engine.problem(120.0)
    assert not engine.is_broken
    runner.go()
    client.rest()
    engine.release(client.group)
    settle(engine)
    assert engine.problem(120.0) is None


def test_an_engine_that_was_not_started_cannot_serve() -> None:
    """Neither before its start nor after its end."""
    engine = Engine(BlockPool(4, 4), make_limits(), CountingRunner(), ())
    assert "the engine thread is not running" == engine.problem(NEVER_HUNG)
    engine.start()
    assert engine.problem(NEVER_HUNG) is None
    engine.close()
    engine.close()
    assert "the engine thread is not running" == engine.problem(NEVER_HUNG)


def test_closing_answers_every_request() -> None:
    """Running, reserved, waiting and not yet read ones, and those that come too late: each gets an error."""
    runner = GatedRunner()
    engine = Engine(BlockPool(32, 4), make_limits(max_num_seqs=2), runner, ())
    engine.start()
    running = Client(make_work([1], max_tokens=9))
    reserved = Client(make_work([1, 2]), Mode.RECEIVE)
    waiting = Client(make_work([1, 2, 3]))
    for client in (running, reserved, waiting):
        engine.submit(client.group)
    runner.step()
    unread = Client(make_work([1, 2, 3, 4]))
    engine.submit(unread.group)
    unread_release = Client(make_work([1]))
    engine.submit(unread_release.group)
    engine.release(unread_release.group)
    engine.close(timeout_s=0)
    runner.open()
    engine.close()
    late = Client(make_work([1]))
    engine.submit(late.group)
    for client in (running, reserved, waiting, unread, late):
        assert "the engine stopped" == client.error().message
        engine.release(client.group)
    assert unread_release.events.empty()


def test_broken_bookkeeping_ends_the_engine_and_answers_everyone() -> None:
    """Nothing is computed on wrong block tables, and no request is left without an answer."""
    pool = BlockPool(16, 4)
    runner = GatedRunner()
    engine = Engine(pool, make_limits(), runner, ())
    told = threading.Event()
    engine.on_broken(told.set)
    engine.start()
    clients = [Client(make_work([t], max_tokens=9)) for t in (1, 2)]
    for client in clients:
        engine.submit(client.group)
    runner.step()
    runner.go()
    victim = runner.step().decodes[0]
    pool.free(victim.table[0])  # somebody's bug
    engine.cancel(victim.group)
    runner.open()
    assert EngineFault is type(clients[1].error())
    assert told.wait(WAIT_S)
    assert "the engine thread died" == engine.problem(NEVER_HUNG)
    late = Client(make_work([1]))
    engine.submit(late.group)
    assert EngineFault is type(late.error())


def test_a_first_token_is_not_lost_by_a_later_fault(make_engine: MakeEngine) -> None:
    """Events before the fault arrive before the error."""
    runner = GatedRunner()
    engine = make_engine(runner)
    client = Client(make_work([1]))
    engine.submit(client.group)
    runner.step()
    runner.go()
    runner.step()
    runner.go(RuntimeError("device lost"))
    client.take(Admitted)
    assert [1] == [t.token_id for t in client.take(First).tokens]
    assert EngineFault is type(client.error())
    engine.release(client.group)
    runner.open()

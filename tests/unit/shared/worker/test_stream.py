"""A request's events on their way from the engine thread to the event loop."""

from __future__ import annotations

import asyncio
import threading
import time

import pytest

from shared.engine.blocks import BlockPool
from shared.engine.engine import Engine
from shared.engine.sequence import Admitted, Failed, Mode
from shared.errors import InvalidRequest, InvariantBroken, Overloaded
from shared.wire import Finish, First
from shared.worker.stream import EngineRequest
from tests.unit.shared.engine.helpers import VOCAB, CountingRunner, assert_empty, make_limits, make_work


@pytest.fixture
def pool() -> BlockPool:
    """Thirty-two blocks of four."""
    return BlockPool(32, 4)


@pytest.fixture
def engine(pool: BlockPool) -> Engine:
    """Not started."""
    return Engine(pool, make_limits(), CountingRunner(), ())


async def _closed(engine: Engine) -> None:
    await asyncio.to_thread(engine.close)


async def test_events_arrive_in_order(engine: Engine, pool: BlockPool) -> None:
    """From admission to finish, as the engine thread delivered them; afterwards nothing is left."""
    engine.start()
    request = EngineRequest(engine, make_work(range(5), max_tokens=30), Mode.LOCAL)
    assert 0 == (await request.admitted()).cached_tokens
    first = await request.next()
    assert isinstance(first, First)
    made = [token.token_id for token in first.tokens]
    while not isinstance(event := await request.next(), Finish):
        assert isinstance(event, list)
        made += [token.token_id for token in event]
    assert list(range(5, 35)) == made
    request.close()
    request.close()
    await _closed(engine)
    assert_empty(pool)


async def test_events_of_another_thread_keep_their_order_and_wake_the_loop(engine: Engine) -> None:
    """A thousand events from a thread that runs while the loop waits."""
    request = EngineRequest(engine, make_work([1]), Mode.LOCAL)
    events = [Admitted(number, ()) for number in range(1000)]

    def deliver_all() -> None:
        for event in events:
            request.group.deliver(event)

    thread = threading.Thread(target=deliver_all)
    thread.start()
    assert events == [await request.next() for _ in events]
    thread.join()


async def test_a_failure_is_raised_after_the_events_before_it(engine: Engine) -> None:
    """Tokens that were made are not lost by the error."""
    request = EngineRequest(engine, make_work([1]), Mode.LOCAL)
    request.group.deliver(Admitted(0, (3,)))
    request.group.deliver(Failed(Overloaded("no room")))
    assert Admitted(0, (3,)) == await request.admitted()
    with pytest.raises(Overloaded, match="no room"):
        await request.next()


async def test_a_refusal_is_raised_instead_of_the_admission(engine: Engine, pool: BlockPool) -> None:
    """The handler can answer with a status."""
    engine.start()
    request = EngineRequest(engine, make_work([VOCAB]), Mode.LOCAL)
    with pytest.raises(InvalidRequest):
        await request.admitted()
    request.close()
    await _closed(engine)
    assert_empty(pool)


async def test_progress_before_admission_is_a_broken_invariant(engine: Engine) -> None:
    """Whoever waits for blocks must not take tokens for them."""
    request = EngineRequest(engine, make_work([1]), Mode.LOCAL)
    request.group.deliver([])
    with pytest.raises(InvariantBroken):
        await request.admitted()


async def test_the_deadline_is_what_was_left_when_it_came(engine: Engine) -> None:
    """timeout_s counts from the arrival."""
    before = time.monotonic()
    request = EngineRequest(engine, make_work([1]), Mode.LOCAL)
    assert before + 60 <= request.group.deadline <= time.monotonic() + 60


async def test_cancelling_the_waiting_task_loses_no_event(engine: Engine) -> None:
    """A handler that stops waiting for the next event may wait again."""
    request = EngineRequest(engine, make_work([1]), Mode.LOCAL)
    waiting = asyncio.create_task(request.next())
    await asyncio.sleep(0)
    waiting.cancel()
    request.group.deliver(Admitted(0, ()))
    assert Admitted(0, ()) == await request.next()
    with pytest.raises(asyncio.CancelledError):
        await waiting


def test_a_loop_that_is_gone_is_nobody_to_tell(engine: Engine) -> None:
    """The engine thread survives events of requests whose event loop was closed."""

    async def make() -> EngineRequest:
        return EngineRequest(engine, make_work([1]), Mode.LOCAL)

    request = asyncio.run(make())
    request.group.deliver(Admitted(0, ()))

"""Long texts are worked on apart from everything else, in bounds."""

from __future__ import annotations

import asyncio
import gc
import threading
from collections.abc import AsyncIterator
from functools import partial

import pytest

from router.offload import VERY_LONG, Offload
from router.settings import RouterSettings
from shared.errors import InvalidRequest, Overloaded

SHORT, LONG, GIANT = 10, 200, 100 * VERY_LONG + 1


@pytest.fixture
async def offload() -> AsyncIterator[Offload]:
    """Two threads of each kind, three places to wait."""
    made = Offload(RouterSettings(offload_chars=100, text_threads=2, max_text_queued=3))
    yield made
    made.close()


class Stuck:
    """Work that waits to be let go, and tells that it has begun."""

    def __init__(self) -> None:
        self.begun = 0
        self.go = threading.Event()
        self._loop = asyncio.get_running_loop()
        self._told = asyncio.Semaphore(0)

    def __call__(self) -> str:
        self.begun += 1
        self._loop.call_soon_threadsafe(self._told.release)
        self.go.wait(20)
        return "done"

    async def until_begun(self, number: int) -> None:
        """Wait until it runs in so many more threads."""
        async with asyncio.timeout(20):
            for _ in range(number):
                await self._told.acquire()


async def test_giant_texts_hold_up_nothing_else(offload: Offload) -> None:
    """Short work and merely long work go past them."""
    stuck = Stuck()
    giants = [asyncio.create_task(offload.in_thread(GIANT, stuck)) for _ in range(4)]
    try:
        await stuck.until_begun(2)
        assert "here" == await offload.here(lambda: "here")
        assert "thread" == await offload.in_thread(LONG, lambda: "thread")
        assert [False, True, True] == [offload.is_long(size) for size in (SHORT, LONG, GIANT)]
    finally:
        stuck.go.set()
    assert ["done"] * 4 == await asyncio.gather(*giants)
    assert 4 == stuck.begun


async def test_only_so_many_wait(offload: Offload) -> None:
    """Two run and three wait; the next one is told to come again, until there is room.

    Those of the other kind are no part of that: giants once kept everybody out of the threads for long texts.
    """
    stuck = Stuck()
    tasks = [asyncio.create_task(offload.in_thread(GIANT, stuck)) for _ in range(5)]
    try:
        await stuck.until_begun(2)
        with pytest.raises(Overloaded):
            await offload.in_thread(GIANT, lambda: None)
        assert ["long"] * 4 == await asyncio.gather(
            *(offload.in_thread(LONG, lambda: "long") for _ in range(4))
        )
    finally:
        stuck.go.set()
    await asyncio.gather(*tasks)
    assert await offload.in_thread(GIANT, lambda: True)


async def test_long_answers_are_made_in_threads_of_their_own(offload: Offload) -> None:
    """However many wait: what they tell has been computed already. Short ones are made here."""

    def work() -> bytes:
        return threading.current_thread().name.encode()

    assert threading.current_thread().name.encode() == await offload.encoded(SHORT, work)
    names = await asyncio.gather(*(offload.encoded(LONG, work) for _ in range(20)))
    assert all(name.startswith(b"answer") for name in names)


async def test_a_failure_whose_caller_has_gone_is_nobody_s(offload: Offload) -> None:
    """A bad request whose client left as it failed was once logged as an exception never retrieved."""
    told: list[object] = []
    loop = asyncio.get_running_loop()
    loop.set_exception_handler(lambda _, context: told.append(context))

    def leave(task: asyncio.Task[None], turns: int) -> None:
        if turns:
            loop.call_soon(leave, task, turns - 1)
        else:
            task.cancel()

    callers: list[asyncio.Task[None]] = []

    def fail(turns: int) -> None:
        loop.call_soon_threadsafe(leave, callers[-1], turns)
        raise InvalidRequest("it is not read any more")

    for turns in range(40):  # of the loop, from just before the failure to the caller's leaving
        callers.append(asyncio.create_task(offload.in_thread(LONG, partial(fail, turns % 8))))
        await asyncio.gather(callers[-1], return_exceptions=True)
    callers.clear()
    assert await offload.in_thread(LONG, lambda: True)
    gc.collect()
    assert [] == told


async def test_work_whose_caller_has_gone_is_never_begun(offload: Offload) -> None:
    """What runs keeps its thread to the end; what waited is forgotten at once."""
    stuck, never = Stuck(), Stuck()
    never.go.set()
    running = [asyncio.create_task(offload.in_thread(GIANT, stuck)) for _ in range(2)]
    await stuck.until_begun(2)
    waiting = asyncio.create_task(offload.in_thread(GIANT, never))
    await asyncio.sleep(0)
    for task in (*running, waiting):
        task.cancel()
    await asyncio.wait([*running, waiting])
    last = asyncio.create_task(offload.in_thread(GIANT, lambda: "last"))
    stuck.go.set()
    assert "last" == await last
    assert 0 == never.begun


async def test_many_short_ones_take_turns_with_everything_else(offload: Offload) -> None:
    """A burst was once worked off in one go, and a look at /health waited for all of it."""
    seen: list[str] = []
    burst = [asyncio.create_task(offload.here(lambda: seen.append("burst"))) for _ in range(50)]
    health = asyncio.create_task(_steps(seen))
    await asyncio.gather(*burst, health)
    assert seen.index("health") < 10
    assert 50 == seen.count("burst")


async def _steps(seen: list[str]) -> None:
    """As a small request: a few turns of the loop."""
    for _ in range(4):
        await asyncio.sleep(0)
    seen.append("health")


async def test_a_failure_is_the_caller_s(offload: Offload) -> None:
    """And the next one has its turn."""
    with pytest.raises(ZeroDivisionError):
        await offload.here(lambda: 1 / 0)
    with pytest.raises(ZeroDivisionError):
        await offload.in_thread(LONG, lambda: 1 / 0)
    assert 1 == await offload.here(lambda: 1)

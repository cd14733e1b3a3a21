"""Work that ends with its caller, and work that outlasts a cancellation."""

from __future__ import annotations

import asyncio

import pytest
from starlette.types import Message

from shared.asgi.disconnect import finish, run_until_disconnect
from shared.errors import ServingError


async def _never() -> Message:
    await asyncio.Event().wait()
    raise AssertionError("unreachable")


async def test_an_error_of_the_work_passes_through() -> None:
    """With its own type, and the watcher is gone afterwards."""

    async def fail() -> None:
        raise ServingError("x")

    with pytest.raises(ServingError):
        await run_until_disconnect(_never, fail())
    assert 1 == len(asyncio.all_tasks())


async def test_a_cancellation_from_outside_stays_one() -> None:
    """It is not turned into ClientDisconnect."""
    started = asyncio.Event()

    async def work() -> None:
        started.set()
        await asyncio.Event().wait()

    task = asyncio.create_task(run_until_disconnect(_never, work()))
    await started.wait()
    task.cancel()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert 1 == len(asyncio.all_tasks())


async def test_work_that_ends_although_the_client_left_keeps_its_result() -> None:
    """A result that exists is returned, and no cancellation is left pending in the task."""

    async def gone() -> Message:
        return {"type": "http.disconnect"}

    async def stubborn() -> int:
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            return 7
        raise AssertionError("unreachable")

    assert 7 == await run_until_disconnect(gone, stubborn())
    task = asyncio.current_task()
    assert task is not None
    assert 0 == task.cancelling()
    await asyncio.sleep(0)


async def test_finish_outlasts_repeated_cancellation() -> None:
    """The work ends first, then the cancellation is raised."""
    go, started, ended = asyncio.Event(), asyncio.Event(), []

    async def work() -> None:
        started.set()
        await go.wait()
        ended.append(True)

    task = asyncio.create_task(finish(work()))
    await started.wait()
    for _ in range(3):
        task.cancel()
        await asyncio.sleep(0)
    assert not task.done()
    go.set()
    with pytest.raises(asyncio.CancelledError):
        await task
    assert [True] == ended

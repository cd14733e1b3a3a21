"""Ending work whose caller has gone.

A handler that answers in one piece never touches the socket while it works, so nobody tells it that the
client hung up. Here somebody listens.
"""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from typing import Any, TypeVar

from starlette.requests import ClientDisconnect
from starlette.types import Receive

T = TypeVar("T")


async def run_until_disconnect(receive: Receive, work: Coroutine[Any, Any, T]) -> T:
    """Await `work` in the current task, and cancel it when `http.disconnect` arrives.

    Raises ClientDisconnect if the client left first. A cancellation from elsewhere passes through.
    The request's body must have been read before (or is dropped).
    """
    task = asyncio.current_task()
    assert task is not None, "runs inside a task"
    gone = False

    async def watch() -> None:
        nonlocal gone
        while (await receive())["type"] != "http.disconnect":
            pass
        gone = True
        task.cancel()

    watcher = asyncio.create_task(watch(), name="disconnect-watch")
    try:
        return await work
    except asyncio.CancelledError:
        if gone and task.cancelling() == 1:
            raise ClientDisconnect from None
        raise
    finally:
        if gone:
            task.uncancel()
        watcher.cancel()
        await asyncio.wait([watcher])


async def finish(work: Coroutine[Any, Any, None]) -> None:
    """Run `work` to its end; if the current task is cancelled meanwhile, the cancellation comes after it."""
    task = asyncio.create_task(work, name="finish")
    cancelled: asyncio.CancelledError | None = None
    while not task.done():
        try:
            await asyncio.wait([task])
        except asyncio.CancelledError as exc:
            cancelled = exc
    task.result()
    if cancelled is not None:
        raise cancelled

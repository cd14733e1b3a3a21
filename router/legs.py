"""A leg: one open stream to one worker, with the lease that counts it and the task that reads it.

Leaving a leg cancels its work at the worker by closing the connection, unless the stream had already ended; then
its connection is kept for the next request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeAlias, TypeVar

from router.workers.state import Worker
from router.workers.stream import EventStream
from shared.asgi.disconnect import finish
from shared.errors import BackendTimeout, ServingError
from shared.wire import DecodeEvent, PrefillEvent

SETTLE_S = 1.0
"""How long an ended stream may take to end its body before its connection is given up."""

E = TypeVar("E", bound=DecodeEvent | PrefillEvent)


class LegFailed(Exception):
    """A leg brought an error instead of an event. Never leaves the try that it belongs to."""

    def __init__(self, leg: AnyLeg, error: ServingError) -> None:
        super().__init__(error.message)
        self.leg = leg
        self.error = error


class Leg(Generic[E]):
    """Opens its stream in a task of its own, so that an answer that starts late hides no other leg's failure."""

    def __init__(
        self,
        worker: Worker,
        *,
        tokens: int,
        open_stream: Callable[[], Awaitable[EventStream[E]]],
        inbox: Inbox,
    ) -> None:
        self.worker = worker
        self.reported = False
        self._open_stream = open_stream
        self._inbox = inbox
        self._lease: AbstractContextManager[None] = worker.lease(tokens)
        self.closed = False
        self._ended = False
        self._pump: asyncio.Task[None] | None = None

    async def __aenter__(self) -> Self:
        self._lease.__enter__()
        self._pump = asyncio.create_task(self._run())
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self.closed = True
        try:
            if self._pump is not None and not self._pump.done():
                await finish(end(self._pump, grace_s=SETTLE_S if self._ended and exc_type is None else 0.0))
        finally:
            self._lease.__exit__(None, None, None)

    def _silent(self) -> None:
        """Before its first word: the worker does not answer looks either, so nothing will come."""
        self._inbox.put(Arrival(self, None, BackendTimeout(f"{self.worker.name} does not answer any more")))

    async def _run(self) -> None:
        stream: EventStream[E] | None = None
        try:
            with self.worker.watched(self._silent):
                stream = await self._open_stream()
                event = await stream.next()
            while True:
                self._ended = stream.ended
                self._inbox.put(Arrival(self, event))
                if stream.ended:
                    break
                event = await stream.next()
            await stream.settle()
        except ServingError as exc:
            self.reported = stream is not None and stream.reported
            self._ended = self.reported
            self._inbox.put(Arrival(self, None, exc))
            if stream is not None and stream.ended:
                await stream.settle()
        except Exception as exc:  # noqa: BLE001 - a bug of ours must reach the relay, not die in this task
            self._inbox.put(exc)
        finally:
            if stream is not None:
                stream.close()


AnyLeg: TypeAlias = Leg[Any]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One event of one leg, or the error that ended it."""

    leg: AnyLeg
    event: DecodeEvent | PrefillEvent | None
    error: ServingError | None = None


class Inbox:
    """Where the legs of one try put what they read. Holds at most what one request may generate."""

    def __init__(self) -> None:
        self._queue: asyncio.Queue[Arrival | Exception] = asyncio.Queue()

    def put(self, item: Arrival | Exception) -> None:
        self._queue.put_nowait(item)

    async def take(self, within_s: float, waiting_for: AnyLeg) -> Arrival:
        """The next event of a leg that is still open.

        Raises LegFailed: against the leg that failed, or against `waiting_for` when nothing comes in time.
        """
        item = self._there()
        try:
            if item is None:  # a time-out costs more than the rest: only for what has to be waited for
                async with asyncio.timeout(within_s):
                    while item is None:
                        item = _if_open(await self._queue.get())
        except TimeoutError:
            error = BackendTimeout(f"{waiting_for.worker.name} was silent for {within_s:g} s")
            raise LegFailed(waiting_for, error) from None
        if isinstance(item, Exception):
            raise item
        if item.error is not None:
            raise LegFailed(item.leg, item.error)
        return item

    def _there(self) -> Arrival | Exception | None:
        """What can be had without waiting."""
        while not self._queue.empty():
            if (item := _if_open(self._queue.get_nowait())) is not None:
                return item
        return None


def _if_open(item: Arrival | Exception) -> Arrival | Exception | None:
    """Nothing that a closed leg brought is wanted any more."""
    return None if isinstance(item, Arrival) and item.leg.closed else item


async def end(task: asyncio.Task[None], *, grace_s: float = 0.0) -> None:
    """Wait until a task is over, and cancel it when the grace is. To be shielded by `finish`."""
    if grace_s > 0:
        await asyncio.wait({task}, timeout=grace_s)
    task.cancel()
    await asyncio.wait({task})

"""A leg: one open stream to one worker, with the lease that counts it. An inbox: the wait for all legs of a try.

Leaving a leg cancels its work at the worker by closing the connection, unless the stream had already ended; then
its connection is kept for the next request.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Generic, Self, TypeAlias, TypeVar

from router.workers.state import Worker
from router.workers.stream import EventStream
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
    """Open from entering to leaving. `open_stream` gets what is to be called at any news of the stream."""

    def __init__(
        self,
        worker: Worker,
        *,
        tokens: int,
        open_stream: Callable[[Callable[[], None]], EventStream[E]],
        inbox: Inbox,
    ) -> None:
        self.worker = worker
        self._inbox = inbox
        self._open_stream = open_stream
        self._lease: AbstractContextManager[None] = worker.lease(tokens)
        self._is_silent = False
        self._is_over = False

    @property
    def reported(self) -> bool:
        """Was its error told by the worker itself, not caused by its connection?"""
        return self._stream.reported

    @property
    def over(self) -> bool:
        """It has ended or failed: nothing more comes of it."""
        return self._is_over

    async def __aenter__(self) -> Self:
        self._stream = self._open_stream(self._inbox.tell)
        self._lease.__enter__()
        self.worker.watch(self._silent)
        self._inbox.add(self)
        return self

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._inbox.remove(self)
        self.worker.unwatch(self._silent)
        try:
            if exc_type is None and self._stream.ended and not self._stream.settled():
                await self._settle()
        finally:
            self._stream.close()
            self._lease.__exit__(None, None, None)

    def next(self) -> E | None:
        """The next event, None while there is none or when there are no more. Raises ServingError, once."""
        if self._is_over:
            return None
        try:
            if self._is_silent:
                raise BackendTimeout(f"{self.worker.name} does not answer any more")
            event = self._stream.next()
        except BaseException:
            self._is_over = True
            raise
        if event is not None:
            self.worker.unwatch(self._silent)
            self._is_over = self._stream.ended
        return event

    def _silent(self) -> None:
        """Before its first word: the worker does not answer looks either, so nothing will come."""
        self._is_silent = True
        self._inbox.tell()

    async def _settle(self) -> None:
        with suppress(TimeoutError):
            async with asyncio.timeout(SETTLE_S):
                while not self._stream.settled():
                    await self._inbox.news()


AnyLeg: TypeAlias = Leg[Any]


@dataclass(frozen=True, slots=True)
class Arrival:
    """One event of one leg."""

    leg: AnyLeg
    event: DecodeEvent | PrefillEvent


class Inbox:
    """The open legs of one try, and the one wait for any of them. Events stay in their streams until taken."""

    def __init__(self) -> None:
        self._legs: list[AnyLeg] = []
        self._waiter: asyncio.Future[None] | None = None

    def add(self, leg: AnyLeg) -> None:
        """From now on its events are taken."""
        self._legs.append(leg)

    def remove(self, leg: AnyLeg) -> None:
        """Nothing that it brings is wanted any more."""
        self._legs.remove(leg)

    def tell(self) -> None:
        """There may be something new."""
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)

    async def news(self) -> None:
        """Wait until told. For one at a time, who has looked in vain without a wait in between."""
        waiter = self._waiter = asyncio.get_running_loop().create_future()
        try:
            await waiter
        finally:
            self._waiter = None

    async def take(self, within_s: float, waiting_for: AnyLeg) -> Arrival:
        """The next event of any open leg, `waiting_for` being looked at first.

        Raises LegFailed: against the leg that failed, or against `waiting_for` when nothing comes in time.
        """
        arrival = self._look(waiting_for)
        if arrival is not None:  # a time-out costs more than the rest: only for what has to be waited for
            return arrival
        try:
            async with asyncio.timeout(within_s):
                while arrival is None:
                    await self.news()
                    arrival = self._look(waiting_for)
        except TimeoutError:
            error = BackendTimeout(f"{waiting_for.worker.name} was silent for {within_s:g} s")
            raise LegFailed(waiting_for, error) from None
        return arrival

    def _look(self, first: AnyLeg) -> Arrival | None:
        for leg in (first, *(leg for leg in self._legs if leg is not first)):
            try:
                event = leg.next()
            except ServingError as exc:
                raise LegFailed(leg, exc) from exc
            if event is not None:
                return Arrival(leg, event)
        return None

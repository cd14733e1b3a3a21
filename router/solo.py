"""One try over one worker: decode computes the prompt itself (unified mode), or prefill's first token is all."""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from typing import TypeVar

from router.course import Course
from router.fleet import Fleet
from router.legs import Inbox, Leg, LegFailed
from router.opening import Opening, take_opening
from router.patience import LAST_WORDS_S, Patience
from router.report import Way
from router.workers.state import Worker
from router.workers.stream import EventStream
from shared.errors import BackendError, Overloaded
from shared.wire import DecodeEvent, PrefillEvent

E = TypeVar("E", bound=DecodeEvent | PrefillEvent)


class SoloTry:
    """Serves one group of choices, once. Raises as SplitTry does."""

    def __init__(self, fleet: Fleet, course: Course, group: range) -> None:
        self._fleet = fleet
        self._course = course
        self._group = group
        self._inbox = Inbox()
        self._id = course.next_id()
        self._way = Way()

    async def run_prefill_only(self) -> None:
        """The next token is the last one: no reservation, and no KV travels."""
        fleet, course, way = self._fleet, self._course, self._way
        way.topology = "pd"

        def open_stream(worker: Worker, tell: Callable[[], None]) -> EventStream[PrefillEvent]:
            return fleet.client.prefill(worker, course.prefill_request(self._group, self._id, None), tell)

        async with self._answered(fleet.registry.prefill, open_stream) as (leg, opening):
            way.prefill_worker = leg.worker.name
            course.first(leg, self._group, opening, way)
            if course.unfinished(self._group):
                raise LegFailed(leg, BackendError(f"{leg.worker.name} did not end what it had to end"))
            course.ended(way)
            with suppress(LegFailed):  # nothing that was wanted is lost then, only a connection
                await self._inbox.take(LAST_WORDS_S, leg)

    async def run_unified(self) -> None:
        """Prompt and answer at one decode worker."""
        fleet, course, way = self._fleet, self._course, self._way
        way.topology = "unified"

        def open_stream(worker: Worker, tell: Callable[[], None]) -> EventStream[DecodeEvent]:
            request = course.decode_request(self._group, self._id, local=True)
            return fleet.client.decode(worker, request, tell)

        async with self._answered(fleet.registry.decode, open_stream) as (leg, opening):
            way.decode_worker = leg.worker.name
            course.holders.update(dict.fromkeys(self._group, (leg.worker, self._id)))
            course.first(leg, self._group, opening, way)
            way.injected()
            await self._follow(leg)
            if course.unfinished(self._group):
                raise LegFailed(leg, BackendError(f"{leg.worker.name} finished too early"))
            course.ended(way)

    async def _follow(self, leg: Leg[DecodeEvent]) -> None:
        """Relay decode's tokens until it has finished; after the last one wait a little for what it measured."""
        patience = Patience(self._course, self._group)
        while (limit_s := patience.left_s(self._fleet.settings.decode_timeout_s)) > 0:
            try:
                event = (await self._inbox.take(limit_s, leg)).event
            except LegFailed:
                if patience.is_answered:
                    return
                raise
            if isinstance(event, DecodeEvent) and event.tokens is not None:
                self._way.decoding()
                self._course.tokens(leg, self._group, event.tokens)
            elif isinstance(event, DecodeEvent) and event.finish is not None:
                self._way.finished(event.finish)
                return
            else:
                raise LegFailed(leg, BackendError(f"{leg.worker.name} answered out of turn"))

    @asynccontextmanager
    async def _answered(
        self,
        candidates: Callable[[], Sequence[Worker]],
        open_stream: Callable[[Worker, Callable[[], None]], EventStream[E]],
    ) -> AsyncIterator[tuple[Leg[E], Opening]]:
        """A leg that has brought the first tokens. Workers without room are asked once each."""
        fleet, course = self._fleet, self._course
        refused: dict[str, Overloaded] = {}
        while True:
            worker = await fleet.place(
                lambda exclude: fleet.policy.one(candidates(), avoid=course.avoid, exclude=exclude),
                course,
                self._group,
                refused,
            )
            course.placed(self._way)
            self._way.entered()
            leg: Leg[E] = Leg(
                worker,
                tokens=course.outstanding_tokens(self._group),
                open_stream=partial(open_stream, worker),
                inbox=self._inbox,
            )
            async with leg:
                try:
                    opening = await take_opening(self._inbox, leg, fleet.settings.prefill_timeout_s, deque())
                except LegFailed as exc:
                    if not isinstance(exc.error, Overloaded):
                        raise
                    refused[worker.url] = exc.error
                    continue
                yield leg, opening
                return

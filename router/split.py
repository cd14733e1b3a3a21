"""One try over two workers: reserve at decode, prefill, hand the first token out, follow decode to the end.

        reserved            first             sent / tokens ... finish
    |----- reserve -----|-- queue, prefill --|-- transfer --|-- decode --|

Until `first` another prefill worker can take over under the same reservation; afterwards the KV may be half sent,
so any failure ends the try, and the next one resumes from the tokens that are out.
"""

from __future__ import annotations

from collections import deque
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from time import perf_counter

from router.course import Course, Tries
from router.fleet import Fleet
from router.legs import AnyLeg, Arrival, Inbox, Leg, LegFailed
from router.opening import Opening, take_opening
from router.patience import LAST_WORDS_S, Patience
from router.report import Way
from router.workers.state import Worker
from shared.errors import BackendError, EngineFault, Overloaded
from shared.wire import DecodeEvent, Finish, Handoff, PrefillEvent, Sent


class SplitTry:
    """Serves one group of choices, once."""

    def __init__(self, fleet: Fleet, course: Course, group: range, tries: Tries) -> None:
        self._fleet = fleet
        self._course = course
        self._group = group
        self._tries = tries
        self._inbox = Inbox()
        self._early: deque[Arrival] = deque()
        self._way = Way(topology="pd")
        self._id = course.next_id()

    async def run(self) -> None:
        """Raises LegFailed with the leg to blame, or the ServingError that says there is no room."""
        course, way = self._course, self._way
        async with (
            self._reserved() as (worker, decode, handoff),
            self._prefilled(worker, decode, handoff) as (prefill, opening),
        ):
            course.first(prefill, self._group, opening, way)
            is_told = not course.unfinished(self._group) or await self._follow(prefill, decode)
            course.ended(way)
            if is_told and not prefill.over:
                await self._prefill_done(prefill)

    @asynccontextmanager
    async def _reserved(self) -> AsyncIterator[tuple[Worker, Leg[DecodeEvent], Handoff]]:
        """A prefill worker and a reservation at a decode worker. Those without room are asked once each."""
        fleet, course = self._fleet, self._course
        refused: dict[str, Overloaded] = {}
        while True:
            prefill, worker = await fleet.place(
                lambda exclude: fleet.policy.pair(
                    fleet.registry.prefill(), fleet.registry.decode(), avoid=course.avoid, exclude=exclude
                ),
                course,
                self._group,
                refused,
            )
            placed_at = course.placed(self._way)
            request = course.decode_request(self._group, self._id, local=False)
            async with Leg(
                worker,
                tokens=course.outstanding_tokens(self._group),
                open_stream=partial(fleet.client.decode, worker, request),
                inbox=self._inbox,
            ) as leg:
                try:
                    handoff = await self._grant(leg)
                except LegFailed as exc:
                    if not isinstance(exc.error, Overloaded):
                        raise
                    refused[worker.url] = exc.error
                    continue
                self._way.entered()
                self._way.stages.reserve = perf_counter() - placed_at
                self._way.decode_worker = worker.name
                course.holders.update(dict.fromkeys(self._group, (worker, self._id)))
                yield prefill, leg, handoff
                return

    async def _grant(self, leg: Leg[DecodeEvent]) -> Handoff:
        arrival = await self._inbox.take(self._fleet.settings.reserve_timeout_s, leg)
        if not isinstance(arrival.event, DecodeEvent) or arrival.event.reserved is None:
            raise LegFailed(leg, BackendError(f"{leg.worker.name} granted nothing"))
        return arrival.event.reserved

    @asynccontextmanager
    async def _prefilled(
        self, worker: Worker, decode: Leg[DecodeEvent], handoff: Handoff
    ) -> AsyncIterator[tuple[Leg[PrefillEvent], Opening]]:
        """A prefill leg that has brought the first tokens; a lost or full one is replaced."""
        fleet, course = self._fleet, self._course
        refused: dict[str, Overloaded] = {}
        while True:
            request = course.prefill_request(self._group, self._id, handoff)
            started_at = perf_counter()
            async with Leg(
                worker,
                tokens=len(request.token_ids),
                open_stream=partial(fleet.client.prefill, worker, request),
                inbox=self._inbox,
            ) as leg:
                try:
                    opening = await take_opening(
                        self._inbox, leg, fleet.settings.prefill_timeout_s, self._early
                    )
                except LegFailed as exc:
                    if exc.leg is not leg or self._early:
                        raise
                    if isinstance(exc.error, Overloaded):
                        refused[worker.url] = exc.error
                    elif could_not_send(exc):
                        raise LegFailed(decode, exc.error) from exc
                    else:
                        course.failed(exc.error, self._tries)
                        course.avoid.add(worker.url)
                else:
                    self._way.prefill_worker = worker.name
                    yield leg, opening
                    return
            worker = await fleet.place(
                lambda exclude: fleet.policy.one(
                    fleet.registry.prefill(), avoid=course.avoid, exclude=exclude, like=decode.worker
                ),
                course,
                self._group,
                refused,
            )
            self._way.stages.retry += perf_counter() - started_at
            self._way.entered()

    async def _prefill_done(self, leg: Leg[PrefillEvent]) -> None:
        """Everything wanted is there: let the prefill stream end by itself, so that its connection is kept."""
        try:
            await self._inbox.take(LAST_WORDS_S, leg)
        except LegFailed:
            return

    async def _follow(self, prefill: Leg[PrefillEvent], decode: Leg[DecodeEvent]) -> bool:
        """Relay decode's tokens to the last one, and wait a little for what both workers measured.

        True if the transfer is accounted for: prefill was neither lost nor silent for too long.
        """
        settings, course = self._fleet.settings, self._course
        patience = Patience(course, self._group)
        finish: Finish | None = None
        is_sent = injected = False
        lost: set[AnyLeg] = set()
        while (finish is None and decode not in lost) or not (is_sent or prefill in lost):
            limit_s = patience.left_s(settings.decode_timeout_s if injected else settings.transfer_timeout_s)
            if limit_s <= 0:
                break
            try:
                if self._early:
                    arrival = self._early.popleft()
                else:
                    arrival = await self._inbox.take(limit_s, decode if finish is None else prefill)
            except LegFailed as exc:
                if patience.is_answered or (exc.leg is prefill and injected):
                    lost.add(exc.leg)  # with its account, but nothing else is missing
                    continue
                if exc.leg is prefill and could_not_send(exc):
                    raise LegFailed(decode, exc.error) from exc
                raise
            event = arrival.event
            if isinstance(event, PrefillEvent):
                if event.sent is not None:
                    self._account(event.sent)
                    is_sent = injected = True
                elif event.done is None or not is_sent:
                    raise LegFailed(prefill, BackendError(f"{prefill.worker.name} sent no KV"))
            elif event.tokens is not None:
                injected = True
                self._way.decoding()
                course.tokens(decode, self._group, event.tokens)
            elif event.finish is None:
                raise LegFailed(decode, BackendError(f"{decode.worker.name} answered out of turn"))
            elif not patience.is_answered:
                raise LegFailed(decode, BackendError(f"{decode.worker.name} finished too early"))
            else:
                finish = event.finish
        if finish is not None:
            self._way.finished(finish)
        return is_sent and prefill not in lost

    def _account(self, sent: Sent) -> None:
        self._way.injected()
        self._way.kv_bytes = sent.kv_bytes
        self._way.transport = sent.transport
        self._way.wire_bytes = sent.wire_bytes
        self._way.kv_wire = sent.kv_wire
        self._way.hidden_s = sent.hidden_s
        self._way.stages.transfer = sent.transfer_s


def could_not_send(failure: LegFailed) -> bool:
    """Did a healthy prefill worker report that the hand-off failed? Then the reservation is spent, not it."""
    return failure.leg.reported and not isinstance(failure.error, EngineFault | Overloaded)

"""One /v1/decode request: grant blocks, wait for KV (or compute the prompt), stream tokens.

The open stream is the reservation: closing it cancels. The blocks are freed last, after any receiver has stopped
writing into them.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from dataclasses import dataclass

from services.decode.metrics import DecodeMetrics
from services.decode.reservations import Book, Reservation
from shared.asgi.stream import StreamHead
from shared.engine.sequence import Admitted, Mode, PromptScores
from shared.errors import ReservationGone, ServingError
from shared.kv.book import Received
from shared.kv.manifest import Expected, token_hash
from shared.kv.receiver import Offer
from shared.kv.ticket import Ticket
from shared.observability import canonical_line
from shared.wire import DecodeEvent, DecodeRequest, Finish, First, Handoff
from shared.worker.assemble import Worker
from shared.worker.stream import EngineEvent, EngineRequest


@dataclass(frozen=True)
class DecodeContext:
    """What all requests of this worker use. live: the open streams, for /v1/decode/stop."""

    worker: Worker
    secret: bytes
    book: Book
    reservation_timeout_s: float
    metrics: DecodeMetrics
    live: set[DecodeStream]


class DecodeStream:
    """Owner of the NDJSON stream (shared.asgi.stream.StreamOwner). offer: how KV may come.

    probe: KV is received for measuring, any number of times, and dropped; the stream ends when the caller leaves.
    """

    def __init__(
        self, context: DecodeContext, work: DecodeRequest, offer: Offer, *, probe: bool = False
    ) -> None:
        self.work = work
        self._context = context
        self._offer = offer
        self._request: EngineRequest | None = None
        self._reservation: Reservation | None = None
        self._handoff: Handoff | None = None
        self._finish: Finish | None = None
        self._num_tokens = 0
        self._probe = probe
        self._ending = "probe" if probe else "client_gone"

    async def start(self) -> StreamHead:
        """Wait for blocks, so that a refusal is a status. Raises ServingError."""
        self._context.live.add(self)
        mode = Mode.RECEIVE if self.work.mode == "handoff" else Mode.LOCAL
        try:
            worker = self._context.worker
            grammar = await worker.grammars.state_for(self.work)
            self._request = EngineRequest(worker.engine, self.work, mode, grammar=grammar)
            admitted = await self._request.admitted()
            worker.blocks_in_use(admitted.blocks)
        except ServingError as exc:
            self._ending = exc.code
            raise
        if mode is Mode.RECEIVE:
            self._reserve(admitted)
        return StreamHead()

    async def chunks(self) -> AsyncIterator[bytes]:
        """reserved | prompt_logprobs (if wanted), first; tokens per step, finish. Raises ServingError."""
        assert self._request is not None
        try:
            if self._handoff is not None:
                yield _line(DecodeEvent(reserved=self._handoff))
            while self._finish is None:
                event = await self._next(self._request)
                if isinstance(event, PromptScores):
                    yield _line(DecodeEvent(prompt_logprobs=event.logprobs))
                elif isinstance(event, First):
                    self._num_tokens += len(event.tokens)
                    yield _line(DecodeEvent(first=event))
                elif isinstance(event, list):
                    self._num_tokens += len(event)
                    yield _line(DecodeEvent(tokens=event))
                elif isinstance(event, Finish):
                    self._finish = self._with_kv_bytes(event)
                    self._ending = "ok"
                    yield _line(DecodeEvent(finish=self._finish))
        except ServingError as exc:
            self._ending = exc.code
            raise

    async def aclose(self) -> None:
        """Stop computing, stop receiving, then free the blocks."""
        self._context.live.discard(self)
        if self._request is not None:
            self._context.worker.engine.cancel(self._request.group)
            if self._reservation is not None:
                await self._context.book.close(self._reservation)
            self._request.close()
        self._context.metrics.ended(self._ending)
        received = self._received
        canonical_line(
            "decode",
            ending=self._ending,
            mode=self.work.mode,
            prompt_tokens=len(self.work.token_ids),
            have_tokens=self._handoff.have_tokens if self._handoff else None,
            choices=self.work.num_choices,
            output_tokens=self._num_tokens,
            kv_bytes=received.kv_bytes if received else None,
            wire_bytes=received.wire_bytes if received else None,
            kv_wire=received.kv_wire if received else None,
            decode_queue_s=self._finish.decode_queue_s if self._finish else None,
            decode_s=self._finish.decode_s if self._finish else None,
        )

    def stop_choices(self, choices: list[int]) -> None:
        """The router needs no more tokens of these choices."""
        if self._request is not None:
            self._context.worker.engine.stop_choices(self._request.group, choices)

    async def _next(self, request: EngineRequest) -> EngineEvent:
        """The next event; until KV has come, not later than the reservation lasts while no KV is on its way.

        Of KV on its way the receiver sees that it does come.
        """
        reservation = self._reservation
        while reservation is not None and not self._num_tokens and reservation.received is None:
            try:
                async with asyncio.timeout(self._context.reservation_timeout_s):
                    return await request.next()
            except TimeoutError as exc:
                if reservation.is_waiting:
                    raise ReservationGone("no KV came in the reservation's time") from exc
        return await request.next()

    def _reserve(self, admitted: Admitted) -> None:
        assert self._request is not None
        context, worker = self._context, self._context.worker
        handoff_id, epoch = context.book.next_identity()
        ticket = Ticket(
            handoff_id=handoff_id,
            epoch=epoch,
            kv_url=self._offer.kv_url(handoff_id),
            boot=worker.boot,
            expires_at=time.monotonic() + min(context.reservation_timeout_s, self.work.timeout_s),
            host_id=self._offer.host_id,
            kv_socket=self._offer.kv_socket,
        )
        expected = Expected(
            fingerprint=worker.fingerprint.digest,
            handoff_id=handoff_id,
            epoch=epoch,
            token_hash=token_hash(self.work.token_ids),
            from_token=admitted.cached_tokens,
            num_tokens=len(self.work.token_ids),
            num_choices=self.work.num_choices,
            shape=worker.kv_shape,
            kv_wire=worker.kv_wire,
        )
        self._reservation = Reservation(
            expected,
            worker.kv_sink(admitted.blocks),
            self._request.group,
            None if self._probe else worker.engine,
            worker.limits.vocab_size,
        )
        context.book.add(self._reservation)
        self._handoff = Handoff(
            handoff_id=handoff_id,
            epoch=epoch,
            kv_url=ticket.kv_url,
            ticket=ticket.sign(context.secret),
            have_tokens=admitted.cached_tokens,
            transports=self._offer.transports,
            kv_wire=worker.kv_wire,
        )

    @property
    def _received(self) -> Received | None:
        return self._reservation.received if self._reservation is not None else None

    def _with_kv_bytes(self, finish: Finish) -> Finish:
        received = self._received
        return finish.model_copy(update={"kv_bytes_received": received.kv_bytes if received else 0})


def _line(event: DecodeEvent) -> bytes:
    return event.to_json() + b"\n"

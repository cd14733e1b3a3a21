"""One /v1/prefill request: compute the prompt, say the first tokens, send KV to decode meanwhile.

The blocks are freed last, after the sender's thread has stopped reading them, whatever ended the request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Collection
from concurrent.futures import Executor, Future
from dataclasses import dataclass
from typing import Any

from services.prefill.extent import chunks_from, manifest_from, sent_from
from services.prefill.kept import KeptHandoffs
from services.prefill.metrics import PrefillMetrics
from shared.asgi.stream import StreamHead
from shared.engine.sequence import Admitted, Mode, PromptScores
from shared.errors import InvariantBroken, ServingError
from shared.kv.outgoing import Send
from shared.kv.overlap import LayerOverlap
from shared.kv.progress import FirstTokens, Progress, TransferCancelled
from shared.kv.saved import SavedLayout, SavedRequest
from shared.kv.sender import KvSender
from shared.kv.ticket import ticket_of
from shared.observability import canonical_line
from shared.wire import First, Handoff, PrefillEvent, PrefillRequest, Sent, Work
from shared.worker.assemble import Worker
from shared.worker.stream import EngineEvent, EngineRequest


@dataclass(frozen=True)
class PrefillContext:
    """What all requests of this worker use. senders: one thread for each hand-off under way."""

    worker: Worker
    secret: bytes
    senders: Executor
    sender: KvSender
    metrics: PrefillMetrics
    kept: KeptHandoffs
    overlap: LayerOverlap


class PrefillStream:
    """Owner of the NDJSON stream (shared.asgi.stream.StreamOwner)."""

    def __init__(self, context: PrefillContext, work: PrefillRequest) -> None:
        self._context = context
        self._work = work
        self._progress = Progress(marks=self._marks())
        self._request: EngineRequest | None = None
        self._admitted: Admitted | None = None
        self._thread: Future[Sent] | None = None
        self._sending: asyncio.Future[Sent] | None = None
        self._first: First | None = None
        self._sent: Sent | None = None
        self._ending = "client_gone"

    async def start(self) -> StreamHead:
        """Wait for blocks, so that a refusal is a status. Raises ServingError."""
        try:
            if self._work.handoff is not None:
                ticket_of(self._work.handoff, self._context.secret)
            worker = self._context.worker
            grammar = await worker.grammars.state_for(self._work)
            self._request = EngineRequest(worker.engine, self._work, Mode.PREFILL, self._progress, grammar)
            self._admitted = await self._request.admitted()
            worker.blocks_in_use(self._admitted.blocks)
        except ServingError as exc:
            self._ending = exc.code
            raise
        if self._work.handoff is not None:
            self._thread = self._send(self._work.handoff, self._admitted)
            self._sending = asyncio.wrap_future(self._thread)
        return StreamHead()

    async def chunks(self) -> AsyncIterator[bytes]:
        """prompt_logprobs (if wanted), first, sent (if KV travels), done. Raises ServingError."""
        try:
            event = await self._next()
            while isinstance(event, PromptScores):
                yield _line(PrefillEvent(prompt_logprobs=event.logprobs))
                event = await self._next()
            if not isinstance(event, First):
                raise InvariantBroken("prefill brought something else than first tokens")
            self._first = event
            yield _line(PrefillEvent(first=self._first))
            goes_on = any(token.finish_reason is None for token in self._first.tokens)
            if self._sending is not None and goes_on:
                # Shielded: cancelled, it would look done although its thread still reads the blocks.
                self._sent = await asyncio.shield(self._sending)
                self._context.metrics.sent(self._sent)
                yield _line(PrefillEvent(sent=self._sent))
            self._ending = "ok"
            yield _line(PrefillEvent(done=True))
        except ServingError as exc:
            self._ending = exc.code
            raise

    async def aclose(self) -> None:
        """Stop computing, stop sending, then free the blocks, whatever goes wrong before."""
        self._progress.cancel(self._ending)
        try:
            if self._request is not None:
                self._context.worker.engine.cancel(self._request.group)
                await self._stop_sending()
                await self._keep()
        finally:
            if self._request is not None:
                self._request.close()
            self._account()

    async def _stop_sending(self) -> None:
        if self._thread is not None and self._sending is not None:
            self._thread.cancel()  # if it has not begun
            await asyncio.wait([self._sending])
            # Nobody may be left to take the outcome; asyncio would log it as lost.
            if not self._sending.cancelled():
                self._sending.exception()

    def _account(self) -> None:
        """The request's metric and its one line."""
        self._context.metrics.ended(self._ending)
        canonical_line(
            "prefill",
            ending=self._ending,
            prompt_tokens=len(self._work.token_ids),
            cached_tokens=self._first.cached_tokens if self._first else None,
            choices=self._work.num_choices,
            queue_s=self._first.queue_s if self._first else None,
            prefill_s=self._first.prefill_s if self._first else None,
            transfer_s=self._sent.transfer_s if self._sent else None,
            hidden_s=self._sent.hidden_s if self._sent else None,
            kv_bytes=self._sent.kv_bytes if self._sent else None,
            wire_bytes=self._sent.wire_bytes if self._sent else None,
            kv_wire=self._sent.kv_wire if self._sent else None,
            transport=self._sent.transport if self._sent else None,
        )

    async def _next(self) -> EngineEvent:
        """The engine's answer, or the sender's failure if that comes first: then more compute is in vain."""
        assert self._request is not None
        next_event = asyncio.ensure_future(self._request.next())
        try:
            waited: set[asyncio.Future[Any]] = {next_event}
            if self._sending is not None:
                waited.add(self._sending)
            await asyncio.wait(waited, return_when=asyncio.FIRST_COMPLETED)
            if self._sending is not None and self._sending.done():
                self._raise_failure(self._sending)
            return await next_event
        finally:
            next_event.cancel()

    def _raise_failure(self, sending: asyncio.Future[Sent]) -> None:
        # Called off by the engine itself, because every choice ended: the first tokens are on their way.
        failure = sending.exception()
        if failure is not None and not isinstance(failure, TransferCancelled):
            raise failure

    def _send(self, handoff: Handoff, admitted: Admitted) -> Future[Sent]:
        """Start the sender's thread; it waits for each chunk by itself."""
        context, work = self._context, self._work
        manifest = manifest_from(context.worker, work, handoff, sent_from(work, handoff))
        self._progress.advance(admitted.cached_tokens)

        send = Send(
            handoff=handoff,
            request_id=work.request_id,
            manifest=manifest,
            source=context.worker.kv_source(admitted.blocks),
            progress=self._progress,
            kv_wire=context.worker.kv_wire,
        )
        return context.senders.submit(context.sender.send, send)

    def _marks(self) -> Collection[int]:
        """After which layers of the last chunk the engine tells the sender."""
        work, worker = self._work, self._context.worker
        if work.handoff is None or not (chunks := chunks_from(worker, work, sent_from(work, work.handoff))):
            return ()
        start, end = chunks[-1]
        return self._context.overlap.marks(worker.kv_shape.num_layers, end - start)

    async def _keep(self) -> None:
        """Keep the hand-off if that is wanted, however it ended: all of its KV is still in the pool."""
        context, handoff = self._context, self._work.handoff
        if not context.kept.enabled or handoff is None or self._first is None or self._admitted is None:
            return
        request = SavedRequest(
            work=Work(**{name: getattr(self._work, name) for name in Work.model_fields}),
            model=context.worker.model,
            worker=context.worker.name,
            fingerprint=context.worker.fingerprint,
            sent_from=sent_from(self._work, handoff),
            kv_wire=self._sent.kv_wire if self._sent else None,
        )
        tokens = self._first.tokens
        first = FirstTokens(
            tuple(token.token_id for token in tokens),
            tuple(token.finish_reason is not None for token in tokens),
        )
        layout = SavedLayout(manifest_from(context.worker, self._work, handoff, 0), request)
        source = context.worker.kv_source(self._admitted.blocks)
        await asyncio.get_running_loop().run_in_executor(
            context.senders, context.kept.keep, layout, source, first
        )


def _line(event: PrefillEvent) -> bytes:
    return event.to_json() + b"\n"

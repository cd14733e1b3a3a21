"""Sending for measuring: made-up KV from real blocks, by the real sender, to a probe's reservation at decode.

It travels as a request's would: by prefill's own choice of what is offered, quantised where that is agreed. The
blocks are reserved like a request's, so real requests keep theirs; the engine computes nothing for them and the
prefix cache never learns of them.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from typing import Any, TypeVar

import numpy as np

from services.prefill.extent import chunks_from, manifest_from, sent_from
from services.prefill.stream import PrefillContext
from shared.asgi.stream import StreamHead
from shared.engine.sequence import Admitted, Mode
from shared.errors import DeadlineExceeded, ServingError
from shared.kv.floats import from_float32
from shared.kv.manifest import Manifest
from shared.kv.outgoing import Send
from shared.kv.progress import Progress
from shared.kv.shape import KINDS, KvShape
from shared.kv.ticket import ticket_of
from shared.observability import canonical_line
from shared.wire import PrefillEvent, Sent
from shared.wire_probe import ProbeSend
from shared.worker.stream import EngineRequest

T = TypeVar("T")


class ProbeSendStream:
    """Owner of the NDJSON stream (shared.asgi.stream.StreamOwner): `sent` for each run, then `done`."""

    def __init__(self, context: PrefillContext, work: ProbeSend) -> None:
        self._context = context
        self._work = work
        self._request: EngineRequest | None = None
        self._manifest: Manifest | None = None
        self._admitted: Admitted | None = None
        self._progress = Progress()
        self._running: asyncio.Future[Any] | None = None
        self._num_sent = 0
        self._ending = "client_gone"

    async def start(self) -> StreamHead:
        """Wait for blocks, so that a refusal is a status. Raises ServingError."""
        work, worker = self._work, self._context.worker
        try:
            ticket_of(work.handoff, self._context.secret)
            # Blocks are granted and nothing is computed: the engine waits for KV that never comes.
            self._request = EngineRequest(worker.engine, work, Mode.RECEIVE)
            self._admitted = await self._request.admitted()
        except ServingError as exc:
            self._ending = exc.code
            raise
        self._manifest = manifest_from(worker, work, work.handoff, sent_from(work, work.handoff))
        return StreamHead()

    async def chunks(self) -> AsyncIterator[bytes]:
        """Raises ServingError."""
        try:
            async with asyncio.timeout(self._work.timeout_s):
                await self._in_thread(self._fill)
                for _ in range(self._work.runs):
                    self._progress = Progress()
                    yield _line(PrefillEvent(sent=await self._in_thread(self._send)))
                    self._num_sent += 1
            self._ending = "probe"
            yield _line(PrefillEvent(done=True))
        except TimeoutError as exc:
            self._ending = DeadlineExceeded.code
            raise DeadlineExceeded("the probe's deadline passed") from exc
        except ServingError as exc:
            self._ending = exc.code
            raise

    async def aclose(self) -> None:
        """Stop sending, then free the blocks."""
        self._progress.cancel(self._ending)
        if self._request is not None:
            if self._running is not None:
                await asyncio.wait([self._running])
                if not self._running.cancelled():
                    self._running.exception()
            self._request.close()
        self._context.metrics.ended(self._ending)
        canonical_line(
            "prefill_probe",
            ending=self._ending,
            prompt_tokens=len(self._work.token_ids),
            runs=self._num_sent,
        )

    async def _in_thread(self, act: Callable[[], T]) -> T:
        """Leaving the wait leaves the thread running: `aclose` waits for it."""
        running = asyncio.get_running_loop().run_in_executor(self._context.senders, act)
        self._running = running
        return await asyncio.shield(running)

    def _fill(self) -> None:
        """Write something into the blocks: memory that was never touched would be sent too fast, and what other
        requests left behind is nobody's to send."""
        assert self._admitted is not None
        worker, start = self._context.worker, self._admitted.cached_tokens
        sink = worker.kv_sink(self._admitted.blocks)
        for chunk_start, end in chunks_from(worker, self._work, start):
            pattern = made_up_rows(worker.kv_shape, end - chunk_start)
            for layer in range(worker.kv_shape.num_layers):
                for kind in KINDS:
                    for view in sink.views(layer, kind, chunk_start, end):
                        view[:] = pattern[: len(view)]
            sink.chunk_filled(chunk_start, end)

    def _send(self) -> Sent:
        assert self._admitted is not None
        assert self._manifest is not None
        num_choices = self._manifest.num_choices
        self._progress.finish([0] * num_choices, [True] * num_choices)
        return self._context.sender.send(
            Send(
                handoff=self._work.handoff,
                request_id=self._work.request_id,
                manifest=self._manifest,
                source=self._context.worker.kv_source(self._admitted.blocks),
                progress=self._progress,
                kv_wire=self._context.worker.kv_wire,
            )
        )


def made_up_rows(shape: KvShape, num_tokens: int) -> memoryview:
    """One layer's K or V of so many tokens: [tokens, K, D] of random numbers.

    Numbers and not bytes: some bytes are no finite number, and KV with one of those cannot be quantised.
    """
    rows = memoryview(bytearray(num_tokens * shape.row_bytes))
    count = num_tokens * shape.num_kv_heads * shape.head_dim
    from_float32(np.random.default_rng().random(count, np.float32), shape.dtype, rows)
    return rows


def _line(event: PrefillEvent) -> bytes:
    return event.to_json() + b"\n"

"""The prefill service: token ids in; first tokens out to the router, KV out to decode."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response

from services.prefill.kept import KeptFile, KeptHandoffs
from services.prefill.metrics import PrefillMetrics
from services.prefill.probe import ProbeSendStream
from services.prefill.settings import PrefillSettings
from services.prefill.stream import PrefillContext, PrefillStream
from shared.asgi.openapi import json_body
from shared.asgi.stream import FILE, NDJSON, OwnedStream
from shared.asgi.text import is_internal_id
from shared.errors import NotKept
from shared.kv.outgoing import SendTimeouts
from shared.kv.overlap import LayerOverlap
from shared.kv.sender import KvSender
from shared.kv.transports.choice import usable
from shared.observability import Metrics
from shared.wire import PrefillRequest
from shared.wire_probe import ProbeSend
from shared.worker.assemble import Worker
from shared.worker.routes import take_work, worker_app


def create_app(worker: Worker, settings: PrefillSettings, secret: str) -> FastAPI:
    """The app around a loaded worker; its lifespan starts and stops the engine."""
    metrics = Metrics()
    senders = ThreadPoolExecutor(settings.max_sends, thread_name_prefix="kv-send")
    sender = KvSender(
        secret.encode(),
        usable(settings.kv_transports, settings.kv_shm_bytes, worker.pool_memory, secret=secret.encode()),
        SendTimeouts(connect_s=settings.kv_connect_timeout_s, io_s=settings.kv_io_timeout_s),
    )
    kept = KeptHandoffs(
        settings.kv_save_dir, max_files=settings.kv_save_files, max_bytes=settings.kv_save_bytes
    )
    context = PrefillContext(
        worker=worker,
        secret=secret.encode(),
        senders=senders,
        sender=sender,
        metrics=PrefillMetrics(metrics),
        kept=kept,
        overlap=LayerOverlap(settings.kv_layer_groups, settings.kv_layers_from_tokens),
    )

    @asynccontextmanager
    async def open_senders(_: FastAPI) -> AsyncIterator[None]:
        try:
            yield
        finally:
            await asyncio.to_thread(senders.shutdown)
            sender.close()

    app = worker_app(worker, settings, secret, metrics, open_senders)

    @app.post("/v1/prefill", openapi_extra=json_body(PrefillRequest))
    async def prefill(request: Request) -> Response:
        """Body: shared.wire.PrefillRequest. Answer: NDJSON of shared.wire.PrefillEvent."""
        work = await take_work(request, PrefillRequest, settings)
        return OwnedStream(PrefillStream(context, work), NDJSON)

    @app.post("/v1/prefill/probe", openapi_extra=json_body(ProbeSend))
    async def probe(request: Request) -> Response:
        """Send made-up KV: see shared.wire_probe."""
        return OwnedStream(ProbeSendStream(context, await take_work(request, ProbeSend, settings)), NDJSON)

    @app.get("/v1/kv/{request_id}")
    async def kept_handoff(request_id: str) -> Response:
        """The hand-off of a request as a safetensors file, if this worker keeps them."""
        if not is_internal_id(request_id):
            raise NotKept("this is no request id")
        return OwnedStream(KeptFile(await asyncio.to_thread(kept.open, request_id)), FILE)

    return app

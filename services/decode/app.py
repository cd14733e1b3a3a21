"""The decode service: KV in on its own port, token ids out to the router."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response

from services.decode.metrics import DecodeMetrics
from services.decode.put_log import log_put
from services.decode.reservations import Book
from services.decode.settings import DecodeSettings
from services.decode.stream import DecodeContext, DecodeStream
from shared.asgi.body import parse_json, read_body
from shared.asgi.openapi import json_body
from shared.asgi.stream import NDJSON, OwnedStream
from shared.kv.limits import ReceiveLimits
from shared.kv.put import PutReport
from shared.kv.receiver import KvListener
from shared.kv.transports.choice import offered
from shared.observability import Metrics
from shared.wire import DecodeRequest, StopChoices
from shared.worker.assemble import Worker
from shared.worker.routes import take_work, worker_app


def create_app(worker: Worker, settings: DecodeSettings, secret: str) -> FastAPI:
    """The app around a loaded worker; its lifespan starts and stops engine and KV listener."""
    metrics = Metrics()
    book = Book(worker.boot, time.monotonic)
    own_metrics = DecodeMetrics(metrics, lambda: len(book))
    context = DecodeContext(
        worker=worker,
        secret=secret.encode(),
        book=book,
        reservation_timeout_s=settings.reservation_timeout_s,
        metrics=own_metrics,
        live=set(),
    )
    limits = ReceiveLimits(
        # A hand-off is opened when its prefill begins, so every reservation may have one.
        max_connections=settings.max_receives or settings.max_num_seqs,
        idle_s=settings.reservation_timeout_s,
        grace_s=settings.kv_io_timeout_s,
    )

    def put_ended(report: PutReport) -> None:
        own_metrics.put_ended(report)
        log_put(report)

    @asynccontextmanager
    async def open_listener(app: FastAPI) -> AsyncIterator[None]:
        offer = offered(settings.kv_transports)
        listener = KvListener(
            settings.host,
            settings.kv_port,
            book,
            secret=secret.encode(),
            limits=limits,
            on_end=put_ended,
            transports=offer.transports,
            nixl=offer.nixl,
        )
        app.state.kv_listener = listener
        listener.start()
        try:
            yield
        finally:
            await asyncio.to_thread(listener.close)

    app = worker_app(worker, settings, secret, metrics, open_listener)

    def stream(request: Request, work: DecodeRequest, *, probe: bool = False) -> Response:
        host = settings.kv_host or request.url.hostname or settings.host
        offer = request.app.state.kv_listener.offer(host)
        return OwnedStream(DecodeStream(context, work, offer, probe=probe), NDJSON)

    @app.post("/v1/decode", openapi_extra=json_body(DecodeRequest))
    async def decode(request: Request) -> Response:
        """Body: shared.wire.DecodeRequest. Answer: NDJSON of shared.wire.DecodeEvent."""
        return stream(request, await take_work(request, DecodeRequest, settings))

    @app.post("/v1/decode/probe", openapi_extra=json_body(DecodeRequest))
    async def probe(request: Request) -> Response:
        """A reservation that measures transfers: see shared.wire_probe."""
        work = await take_work(request, DecodeRequest, settings)
        return stream(request, work.model_copy(update={"mode": "handoff"}), probe=True)

    @app.post("/v1/decode/stop", status_code=204, openapi_extra=json_body(StopChoices))
    async def stop(request: Request) -> Response:
        """Body: shared.wire.StopChoices. A request that is not here has ended already: that is no error."""
        body = await read_body(
            request, limit_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s
        )
        wanted = parse_json(body, StopChoices)
        for stream in [s for s in context.live if s.work.request_id == wanted.request_id]:
            stream.stop_choices(wanted.choices)
        return Response(status_code=204)

    return app

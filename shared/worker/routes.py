"""What every worker answers beside its work: /health, /ready, /v1/info, /metrics, and who may ask."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from typing import TypeVar

from fastapi import FastAPI, Request, Response

from shared.asgi.answers import json_response
from shared.asgi.body import parse_json, read_body
from shared.asgi.context import adopt_request_id
from shared.asgi.install import Lifespan, install_http, new_app
from shared.engine.engine import Engine
from shared.errors import Overloaded, Unavailable
from shared.observability import Metrics, metrics_endpoint
from shared.wire import PROTOCOL_VERSION, Work, WorkerInfo
from shared.worker.assemble import Worker
from shared.worker.host import report_host
from shared.worker.settings import WorkerSettings
from shared.worker.warm_up import warm_up

W = TypeVar("W", bound=Work)


def worker_app(
    worker: Worker, settings: WorkerSettings, secret: str, metrics: Metrics, inner: Lifespan
) -> FastAPI:
    """An app with the common routes. `inner` opens and closes what the worker has of its own.

    The engine starts with the app, and the warm-up has passed before the first request is taken.
    """

    @asynccontextmanager
    async def lifespan(app: FastAPI) -> AsyncIterator[None]:
        worker.engine.start()
        try:
            if worker.pages_ahead is not None:
                await asyncio.to_thread(worker.pages_ahead.take)
            await warm_up(worker)
            async with inner(app):
                yield
        finally:
            worker.grammars.close()
            if worker.pages_ahead is not None:
                worker.pages_ahead.close()
            await asyncio.to_thread(worker.engine.close)

    app = new_app(f"handoff {worker.role} worker", lifespan)
    install_http(app, keys=[secret], trust_caller_id=True)
    engine_metrics(worker, metrics)

    def problem() -> str | None:
        if app.state.draining:
            return "draining"
        return worker.engine.problem(settings.step_limit_s)

    @app.get("/health")
    async def health() -> Response:
        """The process is alive."""
        return json_response({"status": "ok"}, 200)

    @app.get("/ready")
    async def ready() -> Response:
        """The worker takes work."""
        reason = problem()
        return json_response({"ready": reason is None, "reason": reason}, 200 if reason is None else 503)

    @app.get("/v1/info")
    async def info() -> Response:
        """Who this worker is and how much it holds: shared.wire.WorkerInfo."""
        body = WorkerInfo(
            protocol=PROTOCOL_VERSION,
            role=worker.role,
            name=worker.name,
            boot=worker.boot,
            model=worker.model,
            fingerprint=worker.fingerprint,
            max_model_len=worker.limits.max_model_len,
            num_blocks=worker.pool.num_blocks,
            block_size=worker.pool.block_size,
            ready=problem() is None,
            draining=app.state.draining,
            load=worker.engine.num_groups,
        )
        return Response(body.to_json(), media_type="application/json")

    measuring = asyncio.Lock()
    pool_is_shared = worker.pool_memory is not None and worker.pool_memory.shared is not None

    @app.get("/v1/host")
    async def host() -> Response:
        """What this worker's host gives it: shared.wire_probe.HostReport. One measurement at a time."""
        if measuring.locked():
            raise Overloaded("this worker is being measured already", retry_after_s=1.0)
        async with measuring:
            report = await asyncio.to_thread(
                report_host, worker.role, settings, pool_is_shared=pool_is_shared
            )
        return Response(report.to_json(), media_type="application/json")

    app.add_api_route("/metrics", metrics_endpoint(metrics), methods=["GET"])
    return app


async def take_work(request: Request, model: type[W], settings: WorkerSettings) -> W:
    """Read and validate a unit of work. Raises Unavailable while draining, InvalidRequest, TooLarge."""
    body = await read_body(request, limit_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s)
    if request.app.state.draining:
        raise Unavailable("this worker is shutting down", retry_after_s=1.0)
    work = parse_json(body, model)
    adopt_request_id(request.scope, work.request_id)
    return work


def engine_metrics(worker: Worker, metrics: Metrics) -> None:
    """The engine's counters and the pool's, read at each scrape."""
    engine = worker.engine

    def gauge(name: str, text: str, read: Callable[[], float]) -> None:
        metrics.gauge(name, text, read=read)

    gauge("requests_live", "Requests in the engine", lambda: engine.num_groups)
    gauge("requests_waiting", "Requests waiting for blocks", lambda: engine.num_waiting)
    gauge("steps", "Forward passes since the start", lambda: engine.counts.steps)
    gauge(
        "prompt_tokens_computed", "Prompt tokens computed here", lambda: engine.counts.prompt_tokens_computed
    )
    gauge("prompt_tokens_cached", "Prompt tokens found here", lambda: engine.counts.prompt_tokens_cached)
    gauge("output_tokens", "Tokens sampled here", lambda: engine.counts.output_tokens)
    gauge("engine_faults", "Steps that failed", lambda: engine.counts.faults)
    for field, text in (
        ("num_blocks", "Blocks in the pool"),
        ("allocated", "Blocks that ever became live"),
        ("freed", "Blocks that ceased to be live"),
        ("live", "Blocks with an owner"),
        ("cached", "Blocks kept for their content"),
        ("promised", "Blocks promised and not yet taken"),
    ):
        gauge(f"blocks_{field.removeprefix('num_')}", text, partial(_pool_count, engine, field))
    gauge("blocks_leaked", "allocated - freed - live; not 0 is a bug", lambda: engine.pool_counts.leaked)


def _pool_count(engine: Engine, field: str) -> float:
    return float(getattr(engine.pool_counts, field))

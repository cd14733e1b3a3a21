"""The router as an ASGI app: routes, and what lives as long as the app does."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager

from fastapi import FastAPI, Request, Response

from router.checkpoint import Checkpoint
from router.fleet import Fleet
from router.metrics import RouterMetrics
from router.offload import Offload
from router.openai.fields import CHAT_FIELDS, COMPLETION_FIELDS, RESPONSE_FIELDS, Field
from router.policy import LeastOutstanding
from router.probe import Prober
from router.relay import Dispatcher
from router.service import Service
from router.settings import RouterSettings
from router.tokenizing import add_tokenizer_routes
from router.workers.client import WorkerClient
from router.workers.registry import Registry
from shared.asgi.answers import json_response
from shared.asgi.context import OPEN_PATHS
from shared.asgi.disconnect import finish
from shared.asgi.install import install_http, new_app
from shared.asgi.openapi import json_body, object_schema
from shared.errors import UnknownModel
from shared.observability import Metrics, metrics_endpoint

EXPOSED_HEADERS = (
    "server-timing",
    "x-request-id",
    "x-handoff-prefill-worker",
    "x-handoff-decode-worker",
    "x-handoff-kv-bytes",
    "x-handoff-wire-bytes",
    "x-handoff-kv-wire",
    "x-handoff-transport",
    "x-handoff-cached-tokens",
    "x-handoff-topology",
    "x-handoff-prompt-tokens-computed-on-decode",
    "x-handoff-hidden-transfer-ms",
    "x-handoff-transfer-gb-per-s",
    "x-handoff-retries",
)


def create_app(
    settings: RouterSettings, checkpoint: Checkpoint, secret: str, *, keys: Sequence[str] = ()
) -> FastAPI:
    """The app over the workers that `settings` name; its lifespan starts and stops the looks at them.

    keys: what clients may authenticate with; none means that everything is open.
    """
    client = WorkerClient(settings, secret)
    registry = Registry(
        client,
        prefill_urls=settings.prefill_urls,
        decode_urls=settings.decode_urls,
        interval_s=settings.health_interval_s,
        tokenizer_digest=checkpoint.tokenizer_digest,
    )
    fleet = Fleet(settings, client, registry, LeastOutstanding())
    dispatcher = Dispatcher(fleet)
    prober = Prober(fleet, registry)
    metrics = Metrics()
    offload = Offload(settings)
    service = Service(
        settings,
        checkpoint,
        registry,
        dispatcher,
        lambda s: RouterMetrics(
            metrics, in_flight=lambda: s.in_flight, relays=lambda: dispatcher.num_running
        ),
        offload,
    )

    @asynccontextmanager
    async def lifespan(_: FastAPI) -> AsyncIterator[None]:
        background = [asyncio.create_task(registry.run()), asyncio.create_task(prober.run())]
        try:
            yield
        finally:
            offload.close()
            for task in background:
                task.cancel()
            await finish(_stop(background, dispatcher, client))

    app = new_app("handoff router", lifespan)
    install_http(
        app,
        keys=keys,
        trust_caller_id=False,
        open_paths=OPEN_PATHS,
        cors_origins=settings.cors_origins,
        expose_headers=EXPOSED_HEADERS,
    )
    _add_model_routes(app, checkpoint, registry)
    add_tokenizer_routes(app, settings, checkpoint, registry, offload)
    _add_state_routes(app, registry, prober)
    app.add_api_route("/metrics", metrics_endpoint(metrics), methods=["GET"])

    @app.post("/v1/chat/completions", openapi_extra=_fields(CHAT_FIELDS, "messages"))
    async def chat(request: Request) -> Response:
        """Chat, whole or streamed."""
        return await service.answer(request, "chat")

    @app.post("/v1/completions", openapi_extra=_fields(COMPLETION_FIELDS, "prompt"))
    async def completions(request: Request) -> Response:
        """Plain text or token ids, whole or streamed."""
        return await service.answer(request, "completions")

    @app.post("/v1/responses", openapi_extra=_fields(RESPONSE_FIELDS, "input"))
    async def responses(request: Request) -> Response:
        """Chat in the form of the newer API, whole or as typed events."""
        return await service.answer(request, "responses")

    return app


def _fields(table: tuple[Field, ...], required: str) -> dict[str, object]:
    return json_body(object_schema((f.name for f in table if f.status == "supported"), required=[required]))


def _add_model_routes(app: FastAPI, checkpoint: Checkpoint, registry: Registry) -> None:
    created = int(time.time())

    def model() -> dict[str, object]:
        return {
            "id": checkpoint.name,
            "object": "model",
            "created": created,
            "owned_by": "handoff",
            "max_model_len": checkpoint.max_model_len(registry.max_model_len()),
        }

    @app.get("/v1/models")
    async def models() -> Response:
        """The one served model."""
        return json_response({"object": "list", "data": [model()]}, 200)

    @app.get("/v1/models/{name:path}")
    async def one_model(name: str) -> Response:
        """The served model by its name, which may hold a slash."""
        if name != checkpoint.name:
            raise UnknownModel("The model that the path names is not served here.", param="model")
        return json_response(model(), 200)


def _add_state_routes(app: FastAPI, registry: Registry, prober: Prober) -> None:
    @app.get("/health")
    async def health() -> Response:
        """The process is alive."""
        return json_response({"status": "ok"}, 200)

    @app.get("/ready")
    async def ready() -> Response:
        """A pair of workers that has proved itself can serve; what is known of every worker."""
        is_ready = prober.ready and not app.state.draining
        state = {"ready": is_ready, "draining": app.state.draining, "probe_error": prober.last_error}
        return json_response(state | registry.report(), 200 if is_ready else 503)


async def _stop(background: list[asyncio.Task[None]], dispatcher: Dispatcher, client: WorkerClient) -> None:
    await asyncio.wait(background)
    await dispatcher.aclose()
    await client.aclose()

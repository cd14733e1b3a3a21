"""Routes of the tokenizer: text to ids and back, without any worker."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from fastapi import FastAPI, Request, Response

from router.checkpoint import Checkpoint
from router.offload import Offload
from router.openai.body import refuse_deep
from router.openai.resolve import Resolver
from router.openai.tokenize import TokenizerApi
from router.settings import RouterSettings
from router.workers.registry import Registry
from shared.asgi.answers import json_response
from shared.asgi.body import read_body
from shared.asgi.disconnect import run_until_disconnect
from shared.asgi.openapi import json_body, object_schema


def add_tokenizer_routes(
    app: FastAPI, settings: RouterSettings, checkpoint: Checkpoint, registry: Registry, offload: Offload
) -> None:
    """/tokenize and /detokenize, under /v1 as well."""
    api = TokenizerApi(
        checkpoint.tokenizer, Resolver(checkpoint.tokenizer, checkpoint.template), checkpoint.facts
    )

    async def answer(
        request: Request, compute: Callable[[bytes], tuple[str | None, dict[str, Any]]]
    ) -> Response:
        body = await read_body(
            request, limit_bytes=settings.max_body_bytes, timeout_s=settings.body_timeout_s
        )
        with refuse_deep():
            work = partial(compute, body)
            if offload.is_long(len(body)):
                model, content = await run_until_disconnect(
                    request.receive, offload.in_thread(len(body), work)
                )
            else:
                model, content = await offload.here(work)
        checkpoint.check_name(model)
        return json_response(content, 200)

    texts = json_body(
        object_schema(["model", "prompt", "messages", "add_special_tokens", "return_token_strs"])
    )
    ids = json_body(object_schema(["model", "tokens"], required=["tokens"]))

    @app.post("/tokenize", openapi_extra=texts)
    @app.post("/v1/tokenize", openapi_extra=texts)
    async def tokenize(request: Request) -> Response:
        """Token ids of a prompt or of a conversation."""
        max_model_len = checkpoint.max_model_len(registry.max_model_len())
        return await answer(request, lambda body: api.tokenize(body, max_model_len))

    @app.post("/detokenize", openapi_extra=ids)
    @app.post("/v1/detokenize", openapi_extra=ids)
    async def detokenize(request: Request) -> Response:
        """The text of token ids."""
        return await answer(request, api.detokenize)

"""A prefill and a decode worker without a model that answer at once: what is left of a request is the router.

    python -m services.cli.instant_workers PREFILL_PORT DECODE_PORT TOKENIZER_DIGEST MAX_MODEL_LEN

They speak shared/wire.py over the same server as real workers. A decode worker gives one token a line and lets
the other streams have their turn after each, as a step of a real engine does.
"""

from __future__ import annotations

import asyncio
import sys
from collections.abc import AsyncIterator

import uvicorn
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route

from shared.server import server_config
from shared.wire import (
    PROTOCOL_VERSION,
    DecodeEvent,
    DecodeRequest,
    Fingerprint,
    Finish,
    First,
    Handoff,
    PrefillEvent,
    PrefillRequest,
    Role,
    Sent,
    TokenOut,
    Wire,
    WorkerInfo,
)

TOKEN_IDS = range(32, 90)  # letters and signs in every byte-level tokenizer
_NDJSON = "application/x-ndjson"


class InstantWorkers:
    """Both roles share the reservations, so that KV "arrives" by setting an event."""

    def __init__(self, tokenizer_digest: str, max_model_len: int) -> None:
        self._tokenizer_digest = tokenizer_digest
        self._max_model_len = max_model_len
        self._arrived: dict[str, asyncio.Event] = {}

    def app(self, role: Role) -> Starlette:
        """The routes of one role."""

        async def info(_: Request) -> Response:
            return Response(self._info(role).to_json(), media_type="application/json")

        async def work(request: Request) -> Response:
            body = await request.body()
            return StreamingResponse(
                self._prefill(body) if role == "prefill" else self._decode(body), media_type=_NDJSON
            )

        async def stop(_: Request) -> Response:
            return Response(b"{}", media_type="application/json")

        return Starlette(
            routes=[
                Route("/v1/info", info),
                Route(f"/v1/{role}", work, methods=["POST"]),
                Route("/v1/decode/stop", stop, methods=["POST"]),
            ]
        )

    async def _prefill(self, body: bytes) -> AsyncIterator[bytes]:
        work = PrefillRequest.model_validate_json(body)
        yield _line(PrefillEvent(first=_first(len(work.token_ids), work.max_new_tokens)))
        if work.handoff is not None:
            self._arrived[work.handoff.handoff_id].set()
            sent = Sent(transport="tcp", kv_bytes=0, wire_bytes=0, transfer_s=0.0, hidden_s=0.0)
            yield _line(PrefillEvent(sent=sent))
        yield _line(PrefillEvent(done=True))

    async def _decode(self, body: bytes) -> AsyncIterator[bytes]:
        work = DecodeRequest.model_validate_json(body)
        if work.mode == "handoff":
            arrived = self._arrived[work.request_id] = asyncio.Event()
            handoff = Handoff(
                handoff_id=work.request_id, epoch=1, kv_url="http://instant", ticket="none", have_tokens=0
            )
            yield _line(DecodeEvent(reserved=handoff))
            try:
                await arrived.wait()
            finally:
                del self._arrived[work.request_id]
        else:
            yield _line(DecodeEvent(first=_first(len(work.token_ids), work.max_new_tokens)))
        for position in range(1, work.max_new_tokens):
            is_last = position == work.max_new_tokens - 1
            yield _line(DecodeEvent(tokens=[_token(position, is_last=is_last)]))
            await asyncio.sleep(0)
        finish = Finish(
            kv_bytes_received=0, prompt_tokens_computed=0, output_tokens=0, decode_queue_s=0.0, decode_s=0.0
        )
        yield _line(DecodeEvent(finish=finish))

    def _info(self, role: Role) -> WorkerInfo:
        return WorkerInfo(
            protocol=PROTOCOL_VERSION,
            role=role,
            name=f"instant-{role}",
            boot="1",
            model="instant",
            fingerprint=Fingerprint(
                weights="none",
                config="none",
                tokenizer=self._tokenizer_digest,
                dtype="float32",
                layout="none",
                rope="none",
                num_layers=1,
                num_kv_heads=1,
                head_dim=1,
            ),
            max_model_len=self._max_model_len,
            num_blocks=1,
            block_size=16,
            ready=True,
            draining=False,
            load=0,
        )


def _token(position: int, *, is_last: bool) -> TokenOut:
    token_id = TOKEN_IDS[position % len(TOKEN_IDS)]
    return TokenOut(choice=0, token_id=token_id, finish_reason="length" if is_last else None)


def _first(num_tokens: int, max_new_tokens: int) -> First:
    return First(
        tokens=[_token(0, is_last=max_new_tokens == 1)],
        cached_tokens=0,
        computed_tokens=num_tokens,
        queue_s=0.0,
        prefill_s=0.0,
    )


def _line(event: Wire) -> bytes:
    return event.to_json() + b"\n"


async def _serve(workers: InstantWorkers, prefill_port: int, decode_port: int) -> None:
    servers = []
    for role, port in (("prefill", prefill_port), ("decode", decode_port)):
        config = server_config(workers.app("prefill" if role == "prefill" else "decode"))
        config.host, config.port = "127.0.0.1", port
        servers.append(uvicorn.Server(config))
    await asyncio.gather(*(server.serve() for server in servers))


if __name__ == "__main__":
    prefill, decode, digest, length = sys.argv[1:]
    asyncio.run(_serve(InstantWorkers(digest, int(length)), int(prefill), int(decode)))

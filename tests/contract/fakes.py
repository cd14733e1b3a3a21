"""Workers without a model that speak shared/wire.py over real uvicorn, and do at each point what a test says.

The token of a choice at a position is a function of both, as with the real sampler, so a resumed answer can be told
from a wrong one. KV "travels" by a call from the fake prefill worker to the fake decode worker.
"""

from __future__ import annotations

import asyncio
import itertools
import socket
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from time import perf_counter
from typing import Any

import uvicorn
from fastapi import FastAPI, Request
from starlette.responses import Response
from starlette.types import ASGIApp

from shared.asgi.body import parse_json, read_body
from shared.asgi.install import install_http
from shared.asgi.stall import SEND_TIMEOUT_S
from shared.asgi.stream import NDJSON, OwnedStream, StreamHead
from shared.errors import ReservationGone
from shared.pool_size import PoolSize
from shared.server import server_config
from shared.wire import (
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
    StopChoices,
    TokenOut,
    Work,
    WorkerInfo,
)

SECRET = "fake-worker-secret"
KV_BYTES_PER_TOKEN = 64
BLOCK_SIZE = 16
Hook = Callable[[Work], Awaitable[None]]


def token_at(choice: int, position: int) -> int:
    """What every worker samples for this choice at this position."""
    return 1 + (choice * 7919 + position * 31) % 199


def print_of(**changes: Any) -> Fingerprint:
    """A fingerprint like every fake's, but for `changes`."""
    base = Fingerprint(
        weights="w", config="c", tokenizer="t", dtype="float32", layout="l", rope="r",
        num_layers=1, num_kv_heads=1, head_dim=8,
    )  # fmt: skip
    return base.model_copy(update=changes)


def listener(port: int) -> socket.socket:
    """A bound socket. NOTE: asyncio sets TCP_NODELAY only where the protocol number says TCP, which
    socket.create_server leaves out; without it every small write after another waits 40 ms for an ACK."""
    sock = socket.socket(socket.AF_INET, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    sock.bind(("127.0.0.1", port))
    return sock


class SameLoopServer(uvicorn.Server):
    """uvicorn on a free port in the test's own loop, so that tests steer it with plain asyncio events."""

    def __init__(self, app: ASGIApp, *, send_timeout_s: float = SEND_TIMEOUT_S) -> None:
        super().__init__(server_config(app, send_timeout_s=send_timeout_s))
        self.socket = listener(0)
        self.port = int(self.socket.getsockname()[1])
        self.up = asyncio.Event()
        self.down = asyncio.Event()

    async def startup(self, sockets: list[socket.socket] | None = None) -> None:
        await super().startup(sockets)
        self.up.set()

    async def main_loop(self) -> None:
        await self.down.wait()
        self.cut()

    def cut(self) -> None:
        """Every connection is reset and every handler cancelled, as when the process is killed."""
        for connection in list(self.server_state.connections):
            connection.transport.abort()
        for task in list(self.server_state.tasks):
            task.cancel()


class FakeWorker:
    """One worker. `hooks[point]` is awaited when a request gets there; it may wait, raise, or kill the worker.

    Points: decode reserve, reserved, injected, token, finish; prefill received, first, send, sent, done.
    """

    def __init__(self, role: Role, name: str, peers: dict[str, FakeWorker], **changes: Any) -> None:
        self.role: Role = role
        self.name = name
        self.fingerprint = print_of(**changes)
        self.peers = peers
        self.boot = 1
        self.ready = True
        self.draining = False
        self.num_blocks = 256  # all of the context
        self.hooks: dict[str, Hook] = {}
        self.requests: list[Work] = []
        self.stopped: list[StopChoices] = []
        self.seen: Counter[str] = Counter()
        self.num_live = 0
        self.callers: set[tuple[str, int]] = set()  # a port of theirs for each connection with work
        self.injections: dict[str, asyncio.Future[Work]] = {}
        self._ids = itertools.count()
        self._moved = asyncio.Condition()
        self._server: SameLoopServer | None = None
        self._serving: asyncio.Task[None] | None = None
        self.url = ""

    @property
    def pool(self) -> PoolSize:
        """What it says of its pool; nothing in here is ever full."""
        return PoolSize(self.num_blocks, BLOCK_SIZE)

    async def up(self) -> None:
        """Start (again) on a new port the first time, on the same one afterwards."""
        self._server = SameLoopServer(self._app())
        if self.url:
            self._server.socket.close()
            self._server.socket = listener(int(self.url.rsplit(":", 1)[1]))
        else:
            self.url = f"http://127.0.0.1:{self._server.port}"
        self._serving = asyncio.create_task(self._server._serve([self._server.socket]))
        await self._server.up.wait()

    async def kill(self) -> None:
        """Die now: every connection breaks and new ones are refused. May be called from within a request."""
        server, self._server = self._server, None
        if server is None:
            return
        for listener in server.servers:
            listener.close()
        server.socket.close()
        server.should_exit = True
        for connection in list(server.server_state.connections):
            connection.transport.abort()
        server.down.set()

    async def restart(self) -> None:
        """Die, and come back with a new boot id."""
        await self.kill()
        await self.join()
        self.boot += 1
        self.hooks.clear()
        await self.up()

    async def join(self) -> None:
        if self._serving is not None:
            await self._serving

    async def until(self, condition: Callable[[FakeWorker], bool]) -> None:
        """Wait until something that this worker counts makes the condition true."""
        async with self._moved, asyncio.timeout(10):
            await self._moved.wait_for(lambda: condition(self))

    async def at(self, point: str, work: Work) -> None:
        self.seen[point] += 1
        await self._tell()
        if point in self.hooks:
            await self.hooks[point](work)
            if self._server is None:
                await asyncio.Event().wait()  # the dead do nothing any more

    async def live(self, change: int) -> None:
        self.num_live += change
        await self._tell()

    async def _tell(self) -> None:
        async with self._moved:
            self._moved.notify_all()

    def grant(self) -> Handoff:
        handoff_id = f"h{next(self._ids)}"
        self.injections[handoff_id] = asyncio.get_running_loop().create_future()
        return Handoff(handoff_id=handoff_id, epoch=self.boot, kv_url=self.name, ticket="t", have_tokens=0)

    def inject(self, handoff: Handoff, work: Work) -> None:
        """KV arrives. Raises ReservationGone for a reservation that is not waiting."""
        waiting = self.injections.get(handoff.handoff_id)
        if waiting is None or waiting.done() or handoff.epoch != self.boot or self._server is None:
            raise ReservationGone("no such reservation")
        waiting.set_result(work)

    def _app(self) -> FastAPI:
        app = FastAPI()
        install_http(app, keys=[SECRET], trust_caller_id=True)

        @app.get("/v1/info")
        async def info() -> Response:
            await self.at("info", None)  # type: ignore[arg-type]
            return Response(
                WorkerInfo(
                    protocol=2, role=self.role, name=self.name, boot=f"{self.name}-{self.boot}", model="m",
                    fingerprint=self.fingerprint, max_model_len=4096,
                    num_blocks=self.num_blocks, block_size=BLOCK_SIZE,
                    ready=self.ready, draining=self.draining, load=self.num_live,
                ).to_json()
            )  # fmt: skip

        @app.post("/v1/decode")
        async def decode(request: Request) -> Response:
            body = parse_json(await read_body(request, limit_bytes=2**20, timeout_s=5), DecodeRequest)
            self.callers.add(request.scope["client"])
            return OwnedStream(DecodeRun(self, body), NDJSON)

        @app.post("/v1/prefill")
        async def prefill(request: Request) -> Response:
            body = parse_json(await read_body(request, limit_bytes=2**20, timeout_s=5), PrefillRequest)
            self.callers.add(request.scope["client"])
            return OwnedStream(PrefillRun(self, body), NDJSON)

        @app.post("/v1/decode/stop")
        async def stop(request: Request) -> Response:
            body = parse_json(await read_body(request, limit_bytes=2**20, timeout_s=5), StopChoices)
            self.stopped.append(body)
            await self._tell()
            return Response(b"{}")

        return app


class Run:
    """One stream of a fake worker."""

    def __init__(self, worker: FakeWorker, work: Any) -> None:
        self.worker = worker
        self.work = work
        self.received_at = perf_counter()
        worker.requests.append(work)

    async def start(self) -> StreamHead:
        await self.worker.live(+1)
        return StreamHead()

    async def aclose(self) -> None:
        await self.worker.live(-1)

    def token(self, choice: int, position: int) -> TokenOut:
        """The last one by length says so."""
        last = position - self.work.num_prompt_tokens + 1 >= self.work.sampling.max_tokens
        return TokenOut(
            choice=choice, token_id=token_at(choice, position), finish_reason="length" if last else None
        )

    def first(self) -> First:
        position = len(self.work.token_ids)
        choices = range(self.work.first_choice, self.work.first_choice + self.work.num_choices)
        tokens = [self.token(choice, position) for choice in choices]
        if self.work.token_ids[0] == END_AT_ONCE:
            tokens = [t.model_copy(update={"finish_reason": "stop"}) for t in tokens]
        return First(
            tokens=tokens,
            cached_tokens=3,
            computed_tokens=position - 3,
            queue_s=0.0,
            prefill_s=perf_counter() - self.received_at,
        )


END_AT_ONCE = 199
"""As a prompt's first token: every choice ends with its first token."""


class DecodeRun(Run):
    """Reservation, injection, tokens."""

    handoff: Handoff | None = None

    async def start(self) -> StreamHead:
        await super().start()
        await self.worker.at("reserve", self.work)
        return StreamHead()

    async def aclose(self) -> None:
        if self.handoff is not None:
            self.worker.injections.pop(self.handoff.handoff_id).cancel()
        await super().aclose()

    async def chunks(self) -> AsyncIterator[bytes]:
        position = len(self.work.token_ids)
        first = self.first()
        if self.work.mode == "local":
            await self.worker.at("first", self.work)
            yield DecodeEvent(first=first).to_json() + b"\n"
        else:
            self.handoff = self.worker.grant()
            yield DecodeEvent(reserved=self.handoff).to_json() + b"\n"
            await self.worker.at("reserved", self.work)
            await self.worker.injections[self.handoff.handoff_id]
        begun_at = last_at = perf_counter()
        await self.worker.at("injected", self.work)
        going = [t.choice for t in first.tokens if t.finish_reason is None]
        while going:
            position += 1
            await self.worker.at("token", self.work)
            tokens = [self.token(choice, position) for choice in going]
            last_at = perf_counter()
            yield DecodeEvent(tokens=tokens).to_json() + b"\n"
            stopped = {
                c for s in self.worker.stopped if s.request_id == self.work.request_id for c in s.choices
            }
            going = [t.choice for t in tokens if t.finish_reason is None and t.choice not in stopped]
        await self.worker.at("finish", self.work)
        local = self.work.mode == "local"
        finish = Finish(
            kv_bytes_received=0 if local else KV_BYTES_PER_TOKEN * len(self.work.token_ids),
            prompt_tokens_computed=len(self.work.token_ids) if local else 0,
            output_tokens=position, decode_queue_s=0.0, decode_s=last_at - begun_at,
        )  # fmt: skip
        yield DecodeEvent(finish=finish).to_json() + b"\n"


class PrefillRun(Run):
    """First tokens, then the transfer."""

    async def chunks(self) -> AsyncIterator[bytes]:
        await self.worker.at("received", self.work)
        await self.worker.at("first", self.work)
        first = self.first()
        first_at = perf_counter()
        yield PrefillEvent(first=first).to_json() + b"\n"
        if self.work.handoff is not None and any(t.finish_reason is None for t in first.tokens):
            await self.worker.at("send", self.work)
            self.worker.peers[self.work.handoff.kv_url].inject(self.work.handoff, self.work)
            await self.worker.at("sent", self.work)
            num_bytes = KV_BYTES_PER_TOKEN * len(self.work.token_ids)
            sent = Sent(
                transport="tcp",
                kv_bytes=num_bytes,
                wire_bytes=num_bytes + 9,
                transfer_s=perf_counter() - first_at,
                hidden_s=0.0,
            )
            yield PrefillEvent(sent=sent).to_json() + b"\n"
        await self.worker.at("done", self.work)
        yield PrefillEvent(done=True).to_json() + b"\n"


@asynccontextmanager
async def fake_workers(
    *, prefill: int, decode: int, **changes: Any
) -> AsyncIterator[tuple[list[FakeWorker], list[FakeWorker]]]:
    """Running fakes with these fingerprint changes, prefill-0, ... and decode-0, ...; all are down afterwards."""
    peers: dict[str, FakeWorker] = {}
    prefills = [FakeWorker("prefill", f"prefill-{i}", peers, **changes) for i in range(prefill)]
    decodes = [FakeWorker("decode", f"decode-{i}", peers, **changes) for i in range(decode)]
    peers.update({w.name: w for w in (*prefills, *decodes)})
    for worker in peers.values():
        await worker.up()
    try:
        yield prefills, decodes
    finally:
        for worker in peers.values():
            await worker.kill()
            await worker.join()

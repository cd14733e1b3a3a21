"""The router's app over fakes and real sockets, for tests of what clients see."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import AsyncIterator, Callable
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx
import pytest
from fastapi import FastAPI

from router.app import create_app
from router.checkpoint import Checkpoint
from router.keys import load_keys
from router.settings import RouterSettings
from tests.contract.fakes import SECRET, FakeWorker, SameLoopServer, fake_workers, token_at
from tests.support.tiny_model import build_tiny_model

PROMPT = list(range(1, 21))


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    """The tiny model's text side, served as "tiny"."""
    folder: Path = build_tiny_model(tmp_path_factory.mktemp("tiny"))
    return Checkpoint.load(folder, "tiny")


@dataclass
class Site:
    """A router over fakes, and a client of it."""

    app: FastAPI
    http: httpx.AsyncClient
    prefills: list[FakeWorker]
    decodes: list[FakeWorker]
    checkpoint: Checkpoint

    def text(self, choice: int, start: int, count: int) -> str:
        """What `count` tokens of a choice read as, after a prompt of `start` tokens."""
        prompt = self.checkpoint.tokenizer.decode(PROMPT)
        ids = [token_at(choice, start + i) for i in range(count)]
        return self.checkpoint.tokenizer.decode([*PROMPT, *ids]).removeprefix(prompt)

    async def complete(self, **fields: Any) -> httpx.Response:
        """POST /v1/completions."""
        return await self.http.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 6, **fields})

    async def metric(self, name: str) -> float:
        """The value of one line of /metrics."""
        text = (await self.http.get("/metrics")).text
        return float(next(line.split()[-1] for line in text.splitlines() if line.startswith(name)))

    async def quiet(self) -> None:
        """Nothing is left at any worker or in the router."""
        for worker in (*self.prefills, *self.decodes):
            await worker.until(lambda w: w.num_live == 0)
        async with asyncio.timeout(5):
            while await self.metric("handoff_relays") or await self.metric("handoff_in_flight"):
                pass


@asynccontextmanager
async def closing_server(server: SameLoopServer, serving: asyncio.Task[None]) -> AsyncIterator[None]:
    """Stop the server at the end, whatever the end is."""
    try:
        yield
    finally:
        server.down.set()
        await serving


SiteMaker = Callable[..., AbstractAsyncContextManager[Site]]


@pytest.fixture
def site(checkpoint: Checkpoint) -> SiteMaker:
    """site(prefill=1, decode=1, **settings) -> a context with a Site that is ready."""

    @asynccontextmanager
    async def make(*, prefill: int = 1, decode: int = 1, **settings: Any) -> AsyncIterator[Site]:
        digest = checkpoint.tokenizer_digest
        async with fake_workers(prefill=prefill, decode=decode, tokenizer=digest) as (prefills, decodes):
            config = RouterSettings(
                prefill_urls=tuple(w.url for w in prefills),
                decode_urls=tuple(w.url for w in decodes),
                **{"health_interval_s": 1.0, "connect_timeout_s": 10.0, **settings},
            )
            app = create_app(config, checkpoint, SECRET, keys=load_keys(config))
            server = SameLoopServer(app, send_timeout_s=config.send_timeout_s)
            serving = asyncio.create_task(server._serve([server.socket]))
            await server.up.wait()
            async with (
                closing_server(server, serving),
                httpx.AsyncClient(
                    base_url=f"http://127.0.0.1:{server.port}",
                    timeout=20,
                    trust_env=False,
                    verify=ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT),  # reads no certificates: that is slow
                ) as http,
            ):
                async with asyncio.timeout(10):
                    while (await http.get("/ready")).status_code != 200:
                        pass
                for worker in (*prefills, *decodes):
                    await worker.until(lambda w: w.num_live == 0)
                    worker.requests.clear()
                    worker.seen.clear()
                yield Site(app, http, prefills, decodes, checkpoint)

    return make

"""What tests of the shared HTTP layer share: log lines as they are written, and servers by their settings."""

from __future__ import annotations

from collections.abc import Callable, Iterator, MutableMapping
from queue import Queue
from typing import Any

import pytest
import structlog
from fastapi import APIRouter, FastAPI

from shared.asgi.install import install_http
from tests.support.servers import ServerThread


class Lines:
    """Every log line as it is written; `ends` gets each access line, which is the last of its request."""

    def __init__(self) -> None:
        self.all: list[dict[str, Any]] = []
        self.ends: Queue[dict[str, Any]] = Queue()

    def __call__(
        self, _logger: object, method: str, event: MutableMapping[str, Any]
    ) -> MutableMapping[str, Any]:
        line = dict(event, level=method)
        self.all.append(line)
        if line["event"] == "request":
            self.ends.put(line)
        raise structlog.DropEvent


@pytest.fixture
def lines() -> Iterator[Lines]:
    """Catch what the server logs in its thread."""
    caught = Lines()
    structlog.configure(processors=[structlog.contextvars.merge_contextvars, caught])
    yield caught
    structlog.reset_defaults()


@pytest.fixture(scope="module")
def serve_routes() -> Iterator[Callable[..., ServerThread]]:
    """Routes under given `install_http` settings; one server for each of both, since it holds no state."""
    running: dict[str, ServerThread] = {}

    def start(routes: APIRouter, **settings: Any) -> ServerThread:
        name = repr((id(routes), settings))
        if name not in running:
            app = FastAPI()
            app.include_router(routes)
            defaults: dict[str, Any] = {"keys": (), "trust_caller_id": False}
            install_http(app, **(defaults | settings))
            running[name] = ServerThread(app).start()
        return running[name]

    yield start
    for server in running.values():
        server.stop()

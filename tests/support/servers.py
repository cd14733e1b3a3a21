"""Real servers on real sockets for tests, and clients rude enough to test them with."""

from __future__ import annotations

import asyncio
import socket
import struct
import threading
from collections.abc import Mapping
from types import TracebackType
from typing import Self

import httpx
import uvicorn
from starlette.types import ASGIApp

from shared.asgi.stall import SEND_TIMEOUT_S
from shared.server import server_config


class ServerThread:
    """`app` behind a real uvicorn on a free port, in a thread with its own event loop.

    with ServerThread(app) as server:
        server.http.get("/health")

    Leaving the block stops the server, cancels what still runs and joins the thread. `http` is a plain client.
    """

    def __init__(
        self, app: ASGIApp, *, host: str = "127.0.0.1", send_timeout_s: float = SEND_TIMEOUT_S
    ) -> None:
        self._socket = socket.create_server((host, 0))
        self.host, self.port = host, int(self._socket.getsockname()[1])
        self.url = f"http://{host}:{self.port}"
        self.http = httpx.Client(base_url=self.url, verify=False, trust_env=False, timeout=20)
        self._server = _Server(server_config(app, send_timeout_s=send_timeout_s))
        self._thread = threading.Thread(target=self._run, name=f"server-{self.port}", daemon=True)
        self._failure: BaseException | None = None

    @property
    def loop(self) -> asyncio.AbstractEventLoop:
        """The server's loop, for `call_soon_threadsafe`."""
        return self._server.loop

    @property
    def num_requests(self) -> int:
        """Requests that the app is working on right now."""
        return len(self._server.server_state.tasks)

    def start(self) -> Self:
        """Return when the app's lifespan has started and the port is served."""
        self._thread.start()
        self._server.up.wait()
        if self._failure is not None:
            raise RuntimeError("the server did not start") from self._failure
        return self

    def stop(self) -> None:
        """Cut what runs, run the app's shutdown, join."""
        self.http.close()
        if self._thread.is_alive():
            self.loop.call_soon_threadsafe(self._server.cut)
        self._thread.join()
        self._socket.close()

    def __enter__(self) -> Self:
        return self.start()

    def __exit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.stop()

    def _run(self) -> None:
        try:
            self._server.run([self._socket])
        except BaseException as exc:  # noqa: BLE001 - handed to the thread that called start()
            self._failure = exc
        finally:
            self._server.up.set()


class _Server(uvicorn.Server):
    def __init__(self, config: uvicorn.Config) -> None:
        super().__init__(config)
        self.up = threading.Event()
        self.loop: asyncio.AbstractEventLoop
        self._stopping = asyncio.Event()

    async def main_loop(self) -> None:
        self.loop = asyncio.get_running_loop()
        await self.on_tick(0)
        self.up.set()
        await self._stopping.wait()
        running = set(self.server_state.tasks)
        for task in running:
            task.cancel()
        if running:
            await asyncio.wait(running)
        for connection in list(self.server_state.connections):
            connection.transport.abort()

    def cut(self) -> None:
        self._stopping.set()


def connect(server: ServerThread, *, receive_buffer_bytes: int | None = None) -> socket.socket:
    """A plain connection; a small receive buffer makes a slow reader out of it."""
    sock = socket.socket()
    if receive_buffer_bytes is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer_bytes)
    sock.settimeout(20)
    sock.connect((server.host, server.port))
    return sock


def send_request(
    sock: socket.socket,
    method: str,
    path: str,
    *,
    headers: Mapping[str, str] | None = None,
    body: bytes = b"",
) -> None:
    """Write one request, with a Content-Length unless `headers` say otherwise."""
    given = {"Host": "test", "Content-Length": str(len(body)), **(headers or {})}
    head = "".join(f"{name}: {value}\r\n" for name, value in given.items())
    sock.sendall(f"{method} {path} HTTP/1.1\r\n{head}\r\n".encode("latin-1") + body)


def read_until(sock: socket.socket, mark: bytes) -> bytes:
    """Everything up to and including `mark`, or up to the end of the connection."""
    seen = b""
    while mark not in seen:
        piece = sock.recv(65536)
        if not piece:
            break
        seen += piece
    return seen


def reset(sock: socket.socket) -> None:
    """Drop the connection the rude way: the peer gets RST instead of FIN."""
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    sock.close()

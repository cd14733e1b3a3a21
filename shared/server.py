"""Running one app as a process: start, serve, drain, stop.

The first SIGTERM or SIGINT begins the drain: `app.state.draining` becomes true, the port stays open so that
`/ready` and new requests can be told 503 by the app, and running requests may end. A second signal exits at once.
"""

from __future__ import annotations

import asyncio
import contextlib
import os
import signal
import socket
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType

import structlog
import uvicorn
from fastapi import FastAPI
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from shared.asgi.answers import error_response
from shared.asgi.protocol import BoundedHttp
from shared.asgi.stall import SEND_TIMEOUT_S
from shared.errors import Unavailable

KEEP_ALIVE_S = 75
CUT_GRACE_S = 5
_log = structlog.get_logger(__name__)


def serve(
    app: FastAPI,
    *,
    host: str,
    port: int,
    drain_timeout_s: float,
    send_timeout_s: float = SEND_TIMEOUT_S,
    on_drain: Callable[[], None] | None = None,
) -> int:
    """Serve `app` until a signal ends it; the exit code of the process.

    The port is taken before the app's lifespan starts, but listens only once that is through. 0: told to stop,
    and did (requests that outlive `drain_timeout_s` are cut, and each is logged). 1: the address cannot be
    used, or the lifespan failed. send_timeout_s: see server_config. on_drain: called once in the event loop,
    after `draining` was set.
    """
    app.state.draining = False
    try:
        sockets = _bind(host, port)
    except OSError as exc:
        _log.error("cannot_listen", host=host, port=port, reason=exc.strerror or str(exc))
        return 1
    config = server_config(_AnswerCut(app), send_timeout_s=send_timeout_s)
    server = _Server(config, app, drain_timeout_s, on_drain)
    try:
        server.run(sockets)
    except SystemExit as exc:
        # A signal that interrupts the lifespan's own code looks like its failure to whoever awaits it.
        return 0 if exc.code == 0 or server.was_told_to_stop else 1
    except OSError as exc:  # another process began to listen on the address in the meantime
        _log.error("cannot_listen", host=host, port=port, reason=exc.strerror or str(exc))
        return 1
    finally:
        for sock in sockets:
            sock.close()
    return 0


def server_config(app: ASGIApp, *, send_timeout_s: float = SEND_TIMEOUT_S) -> uvicorn.Config:
    """How every server of ours speaks HTTP: also the ones that tests start in a thread.

    Idle connections are kept longer than any client of ours keeps them, so that no request meets a closing one.
    Those whose client has stopped reading are cut after `send_timeout_s`.
    """
    return uvicorn.Config(
        app,
        loop="uvloop",
        http=partial(BoundedHttp, send_timeout_s=send_timeout_s),  # type: ignore[arg-type]
        ws="none",
        lifespan="on",
        log_config=None,
        access_log=False,
        server_header=False,
        proxy_headers=False,
        timeout_keep_alive=KEEP_ALIVE_S,
        timeout_graceful_shutdown=CUT_GRACE_S,
    )


def exit_on_sigterm() -> None:
    """Let SIGTERM end the process, `finally` blocks and all, until `serve` takes over.

    For the time in which a model loads: process 1 of a container ignores signals that nobody handles.
    """

    def leave(number: int, _frame: FrameType | None) -> None:
        sys.exit(128 + number)

    signal.signal(signal.SIGTERM, leave)


class _Server(uvicorn.Server):
    """uvicorn with our end: it would close the port first and cut what takes longer."""

    def __init__(
        self,
        config: uvicorn.Config,
        app: FastAPI,
        drain_timeout_s: float,
        on_drain: Callable[[], None] | None,
    ) -> None:
        super().__init__(config)
        self._app = app
        self._drain_timeout_s = drain_timeout_s
        self._on_drain = on_drain
        self._told_to_stop = asyncio.Event()
        self._num_signals = 0
        self._loop: asyncio.AbstractEventLoop | None = None

    @property
    def was_told_to_stop(self) -> bool:
        """A signal came."""
        return self._num_signals > 0

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:  # noqa: ARG002 - the signature of uvicorn
        """Count the signal. It is kept from uvicorn, which would raise it again and spoil the exit code."""
        self._num_signals += 1
        if self._num_signals > 1:
            try:
                _log.warning("forced_exit", signal=signal.Signals(sig).name)
                sys.stderr.flush()
            finally:  # whatever this signal interrupted, a half-written line included
                os._exit(128 + sig)
        if not self.started or self._loop is None:
            sys.exit(0)
        self._loop.call_soon_threadsafe(self._told_to_stop.set)

    async def main_loop(self) -> None:
        """Wait for the first signal, then for the requests. Wakes once a second, for the Date header."""
        self._loop = asyncio.get_running_loop()
        address = self.servers[0].sockets[0].getsockname()
        _log.info("listening", host=address[0], port=address[1])
        clock = asyncio.create_task(self._keep_date())
        try:
            await self._told_to_stop.wait()
            await self._drain()
        finally:
            clock.cancel()

    async def _keep_date(self) -> None:
        while True:
            await self.on_tick(0)
            await asyncio.sleep(1.0)

    async def _drain(self) -> None:
        self._app.state.draining = True
        running = self.server_state.tasks
        _log.info("draining", requests=len(running), timeout_s=self._drain_timeout_s)
        if self._on_drain is not None:
            self._on_drain()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(self._drain_timeout_s):
                while running:
                    await asyncio.wait(set(running), return_when=asyncio.FIRST_COMPLETED)
        late = set(running)
        if late:
            _log.warning("drain_timeout", requests=len(late))
            for task in late:
                task.cancel()
            await asyncio.wait(late, timeout=CUT_GRACE_S)
        _log.info("drained", cut=len(late))


class _AnswerCut:
    """Ends a request that the drain cancelled: 503 if nothing was sent, else the connection just breaks off."""

    def __init__(self, app: ASGIApp) -> None:
        self.app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def observed_send(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self.app(scope, receive, observed_send)
        except asyncio.CancelledError:
            if scope["type"] != "http":
                raise
            if not started:
                exc = Unavailable("The server is shutting down.", retry_after_s=1)
                await error_response(exc)(scope, receive, send)


def _bind(host: str, port: int) -> list[socket.socket]:
    """One bound socket for each address of `host`, all with one port. Raises OSError; nothing stays open then."""
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    with contextlib.ExitStack() as stack:
        sockets: list[socket.socket] = []
        for family, kind, proto, _, address in dict.fromkeys(found):
            sock = stack.enter_context(socket.socket(family, kind, proto))
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if family == socket.AF_INET6:
                sock.setsockopt(socket.IPPROTO_IPV6, socket.IPV6_V6ONLY, 1)
            sock.bind((address[0], port, *address[2:]))
            port = sock.getsockname()[1]
            sockets.append(sock)
        stack.pop_all()
        return sockets

"""The router's HTTP client to the workers.

Should a worker close a kept connection at the very moment of its reuse, the request goes once more on a new one:
work is tied to its connection, so what a broken one asked for is not done.
"""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable
from types import TracebackType
from typing import TypeVar

import httpx
from pydantic import ValidationError

from router.settings import RouterSettings
from router.workers.connections import Connections
from router.workers.exchange import Exchange
from router.workers.state import Worker
from router.workers.stream import EventStream, as_our_own, from_httpx
from shared.asgi.answers import from_error_response
from shared.asgi.disconnect import finish
from shared.errors import BackendError, BackendTimeout, ServingError
from shared.wire import (
    DecodeEvent,
    DecodeRequest,
    PrefillEvent,
    PrefillRequest,
    StopChoices,
    Wire,
    WorkerInfo,
)

MAX_ANSWER_BYTES = 64 * 2**10

E = TypeVar("E", bound=DecodeEvent | PrefillEvent)


class WorkerClient:
    """Opens event streams at workers. Reads have no time-out here: waits for events are bounded by their stage."""

    def __init__(self, settings: RouterSettings, secret: str) -> None:
        self._headers = {
            "authorization": f"Bearer {secret}",
            "content-type": "application/json",
            "accept-encoding": "identity",
        }
        self._extensions = {
            "timeout": {
                "connect": settings.connect_timeout_s,
                "write": settings.write_timeout_s,
                "read": None,
                "pool": settings.connect_timeout_s,
            }
        }
        self._small_timeout_s = settings.health_timeout_s
        self._max_idle = settings.max_inflight
        self._ssl_context = _ssl_context((*settings.prefill_urls, *settings.decode_urls))
        self._connections: dict[str, Connections] = {}

    async def aclose(self) -> None:
        """Close every idle connection; those in use are closed by who uses them."""
        for connections in self._connections.values():
            await connections.aclose()

    async def decode(self, worker: Worker, request: DecodeRequest) -> EventStream[DecodeEvent]:
        """Open /v1/decode. The reservation lives exactly as long as the stream is open."""
        return await self._stream(worker, "/v1/decode", request, DecodeEvent.model_validate_json)

    async def prefill(self, worker: Worker, request: PrefillRequest) -> EventStream[PrefillEvent]:
        """Open /v1/prefill."""
        return await self._stream(worker, "/v1/prefill", request, PrefillEvent.model_validate_json)

    async def stop(self, worker: Worker, request: StopChoices) -> None:
        """Tell a decode worker that these choices need no more tokens."""
        async with _Bounded(self._small_timeout_s, worker):
            exchange = await self._send(worker, "POST", "/v1/decode/stop", request)
            try:
                if exchange.response.status_code >= 400:
                    raise await _refusal(exchange.response, worker)
            finally:
                await exchange.aclose()

    async def info(self, worker: Worker) -> WorkerInfo:
        """Ask who it is and how it does. Raises BackendError if it does not answer properly."""
        async with _Bounded(self._small_timeout_s, worker):
            exchange = await self._send(worker, "GET", "/v1/info")
            try:
                if exchange.response.status_code != 200:
                    raise await _refusal(exchange.response, worker)
                return WorkerInfo.model_validate_json(await _limited(exchange.response, worker))
            except ValidationError as exc:
                raise BackendError("it does not speak this protocol") from exc
            finally:
                await exchange.aclose()

    async def _stream(
        self, worker: Worker, path: str, body: Wire, parse: Callable[[bytes], E]
    ) -> EventStream[E]:
        exchange = await self._send(worker, "POST", path, body)
        if exchange.response.status_code == 200:
            return EventStream(exchange, parse, worker)
        try:
            refusal = await _refusal(exchange.response, worker)
        except BaseException:
            await exchange.aclose()
            raise
        return EventStream(exchange, parse, worker, refusal=refusal)

    async def _send(self, worker: Worker, method: str, path: str, body: Wire | None = None) -> Exchange:
        """The response's head. Raises BackendError, BackendTimeout."""
        connections = self._connections.get(worker.url)
        if connections is None:
            connections = Connections(max_idle=self._max_idle, ssl_context=self._ssl_context)
            self._connections[worker.url] = connections
        content = None if body is None else body.to_json()

        async def attempt(connection: httpx.AsyncHTTPTransport) -> Exchange:
            request = httpx.Request(
                method, worker.url + path, headers=self._headers, content=content, extensions=self._extensions
            )
            try:
                response = await connection.handle_async_request(request)
            except BaseException:
                await finish(connection.aclose())
                raise
            response.request = request
            return Exchange(response, connection, connections)

        kept = connections.kept()
        try:
            if kept is not None:
                try:
                    return await attempt(kept)
                except httpx.TimeoutException:
                    raise
                except httpx.TransportError:
                    pass  # it was closed while idle: nothing was answered on it, so nothing was begun
            return await attempt(connections.fresh())
        except httpx.TransportError as exc:
            raise from_httpx(exc, worker) from exc


def _ssl_context(urls: Iterable[str]) -> ssl.SSLContext:
    """Shared by all connections. The system's certificates, a tenth of a second, only where a worker needs them."""
    if any(url.startswith("https://") for url in urls):
        return ssl.create_default_context()
    return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)


class _Bounded:
    """A whole small exchange with one time-out, told as BackendTimeout."""

    def __init__(self, limit_s: float, worker: Worker) -> None:
        self._timeout = asyncio.timeout(limit_s)
        self._worker = worker

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(
        self, exc_type: type[BaseException] | None, exc: BaseException | None, traceback: TracebackType | None
    ) -> None:
        try:
            await self._timeout.__aexit__(exc_type, exc, traceback)
        except TimeoutError as late:
            raise BackendTimeout(f"{self._worker.name} did not answer in time") from late


async def _limited(response: httpx.Response, worker: Worker) -> bytes:
    body = bytearray()
    try:
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > MAX_ANSWER_BYTES:
                raise BackendError(f"{worker.name} answered too much")
    except httpx.HTTPError as exc:
        raise from_httpx(exc, worker) from exc
    return bytes(body)


async def _refusal(response: httpx.Response, worker: Worker) -> ServingError:
    """A status other than 200 as the error that its body names; its header tells when to come back."""
    body = await _limited(response, worker)
    retry_after = response.headers.get("retry-after")
    return as_our_own(from_error_response(response.status_code, body, retry_after=retry_after))

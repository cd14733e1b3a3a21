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

from pydantic import ValidationError

from router.settings import RouterSettings
from router.workers.connection import Connection, ConnectionBroken, TransportError
from router.workers.connections import Address, Connections
from router.workers.exchange import Exchange
from router.workers.state import Worker
from router.workers.stream import EventStream, as_our_own, from_transport
from shared.asgi.answers import from_error_response
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
        self._headers = (
            f"authorization: Bearer {secret}\r\n"
            "content-type: application/json\r\naccept-encoding: identity\r\n"
        )
        self._connect_timeout_s = settings.connect_timeout_s
        self._write_timeout_s = settings.write_timeout_s
        self._small_timeout_s = settings.health_timeout_s
        self._max_idle = settings.max_inflight
        self._ssl_context = _ssl_context((*settings.prefill_urls, *settings.decode_urls))
        self._connections: dict[str, Connections] = {}

    async def aclose(self) -> None:
        """Close every idle connection; those in use are closed by who uses them."""
        for connections in self._connections.values():
            connections.close()
        await asyncio.sleep(0)  # a socket is closed in the turn after

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
                if exchange.head.status >= 400:
                    raise await _refusal(exchange, worker)
                await _limited(exchange, worker)
            finally:
                exchange.close()

    async def info(self, worker: Worker) -> WorkerInfo:
        """Ask who it is and how it does. Raises BackendError if it does not answer properly."""
        async with _Bounded(self._small_timeout_s, worker):
            exchange = await self._send(worker, "GET", "/v1/info")
            try:
                if exchange.head.status != 200:
                    raise await _refusal(exchange, worker)
                return WorkerInfo.model_validate_json(await _limited(exchange, worker))
            except ValidationError as exc:
                raise BackendError("it does not speak this protocol") from exc
            finally:
                exchange.close()

    async def _stream(
        self, worker: Worker, path: str, body: Wire, parse: Callable[[bytes], E]
    ) -> EventStream[E]:
        exchange = await self._send(worker, "POST", path, body)
        if exchange.head.status == 200:
            return EventStream(exchange, parse, worker)
        try:
            refusal = await _refusal(exchange, worker)
        except BaseException:
            exchange.close()
            raise
        return EventStream(exchange, parse, worker, refusal=refusal)

    async def _send(self, worker: Worker, method: str, path: str, body: Wire | None = None) -> Exchange:
        """The response's head. Raises BackendError, BackendTimeout."""
        connections = self._connections.get(worker.url)
        if connections is None:
            connections = self._connections[worker.url] = self._to(worker.url)
        request = self._request(connections.address, method, path, b"" if body is None else body.to_json())
        try:
            kept = connections.kept()
            if kept is not None:
                try:
                    return await _exchange(request, kept, connections)
                except ConnectionBroken:
                    if kept.touched:
                        raise
                    # it was closed while idle: nothing was answered on it, so nothing was begun
            return await _exchange(request, await connections.fresh(), connections)
        except TransportError as exc:
            raise from_transport(exc, worker) from exc

    def _to(self, url: str) -> Connections:
        address = Address.of(url)
        return Connections(
            address,
            max_idle=self._max_idle,
            connect_timeout_s=self._connect_timeout_s,
            write_timeout_s=self._write_timeout_s,
            ssl_context=self._ssl_context if address.is_tls else None,
        )

    def _request(self, address: Address, method: str, path: str, content: bytes) -> bytes:
        head = (
            f"{method} {address.path}{path} HTTP/1.1\r\nhost: {address.authority}\r\n"
            f"{self._headers}content-length: {len(content)}\r\n\r\n"
        )
        return head.encode("ascii") + content


async def _exchange(request: bytes, connection: Connection, connections: Connections) -> Exchange:
    try:
        return Exchange(await connection.request(request), connection, connections)
    except BaseException:
        connection.close()
        raise


def _ssl_context(urls: Iterable[str]) -> ssl.SSLContext | None:
    """Shared by all connections. Made only where a worker needs it: loading certificates takes a while."""
    return ssl.create_default_context() if any(url.startswith("https://") for url in urls) else None


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


async def _limited(exchange: Exchange, worker: Worker) -> bytes:
    body = bytearray()
    try:
        while chunk := await exchange.read():
            body += chunk
            if len(body) > MAX_ANSWER_BYTES:
                raise BackendError(f"{worker.name} answered too much")
    except TransportError as exc:
        raise from_transport(exc, worker) from exc
    return bytes(body)


async def _refusal(exchange: Exchange, worker: Worker) -> ServingError:
    """A status other than 200 as the error that its body names; its header tells when to come back."""
    body = await _limited(exchange, worker)
    retry_after = exchange.head.headers.get(b"retry-after")
    return as_our_own(
        from_error_response(
            exchange.head.status,
            body,
            retry_after=None if retry_after is None else retry_after.decode("latin-1"),
        )
    )

"""The router's HTTP client to the workers."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable, Iterable

from pydantic import ValidationError

from router.settings import RouterSettings
from router.workers.call import Call
from router.workers.connection import TransportError
from router.workers.connections import Address, Connections
from router.workers.state import Worker
from router.workers.stream import MAX_ANSWER_BYTES, EventStream, from_transport, refusal
from shared.errors import BackendError, BackendTimeout
from shared.wire import (
    DecodeEvent,
    DecodeRequest,
    PrefillEvent,
    PrefillRequest,
    StopChoices,
    Wire,
    WorkerInfo,
)


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

    def decode(
        self, worker: Worker, request: DecodeRequest, tell: Callable[[], None]
    ) -> EventStream[DecodeEvent]:
        """Begin /v1/decode; `tell` is called at any news. The reservation lives exactly as long as the stream."""
        call = self._call(worker, "POST", "/v1/decode", request, tell)
        return EventStream(call, DecodeEvent.model_validate_json, worker)

    def prefill(
        self, worker: Worker, request: PrefillRequest, tell: Callable[[], None]
    ) -> EventStream[PrefillEvent]:
        """Begin /v1/prefill; `tell` is called at any news."""
        call = self._call(worker, "POST", "/v1/prefill", request, tell)
        return EventStream(call, PrefillEvent.model_validate_json, worker)

    async def stop(self, worker: Worker, request: StopChoices) -> None:
        """Tell a decode worker that these choices need no more tokens. Raises ServingError."""
        await self._ask(worker, "POST", "/v1/decode/stop", request)

    async def info(self, worker: Worker) -> WorkerInfo:
        """Ask who it is and how it does. Raises BackendError if it does not answer properly."""
        answer = await self._ask(worker, "GET", "/v1/info")
        try:
            return WorkerInfo.model_validate_json(answer)
        except ValidationError as exc:
            raise BackendError("it does not speak this protocol") from exc

    async def _ask(self, worker: Worker, method: str, path: str, body: Wire | None = None) -> bytes:
        """The answer of a whole small exchange, with one time-out. Raises BackendError, BackendTimeout."""
        news = asyncio.Event()
        call = self._call(worker, method, path, body, news.set)
        try:
            async with asyncio.timeout(self._small_timeout_s):
                while (head := call.head()) is None or (answer := call.whole(MAX_ANSWER_BYTES)) is None:
                    news.clear()
                    await news.wait()
        except TimeoutError as exc:
            raise BackendTimeout(f"{worker.name} did not answer in time") from exc
        except TransportError as exc:
            raise from_transport(exc, worker) from exc
        finally:
            call.close()
        if not 200 <= head.status < 300:
            raise refusal(head, answer)
        return answer

    def _call(
        self, worker: Worker, method: str, path: str, body: Wire | None, tell: Callable[[], None]
    ) -> Call:
        connections = self._connections.get(worker.url)
        if connections is None:
            connections = self._connections[worker.url] = self._to(worker.url)
        content = b"" if body is None else body.to_json()
        return Call(self._request(connections.address, method, path, content), connections, tell)

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


def _ssl_context(urls: Iterable[str]) -> ssl.SSLContext | None:
    """Shared by all connections. Made only where a worker needs it: loading certificates takes a while."""
    return ssl.create_default_context() if any(url.startswith("https://") for url in urls) else None

"""The router's HTTP client to the workers.

One pool without a connection limit: admission already bounds the requests, and a limit here would only be a second,
hidden queue. Idle connections are dropped after 30 s, well before the workers' servers do so after 75 s. Should a
worker close a kept connection at the very moment of its reuse, the request goes once more on a new one: work is
tied to its connection, so what a broken one asked for is not done.
"""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

import httpx
from pydantic import ValidationError

from router.settings import RouterSettings
from router.workers.state import Worker
from router.workers.stream import EventStream, as_our_own, from_httpx
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

KEEPALIVE_EXPIRY_S = 30.0
MAX_ERROR_BYTES = 64 * 2**10

E = TypeVar("E", bound=DecodeEvent | PrefillEvent)


class WorkerClient:
    """Opens event streams at workers. Reads have no time-out here: waits for events are bounded by their stage."""

    def __init__(self, settings: RouterSettings, secret: str) -> None:
        self._headers = {
            "authorization": f"Bearer {secret}",
            "content-type": "application/json",
            "accept-encoding": "identity",
        }
        self._timeout = httpx.Timeout(
            connect=settings.connect_timeout_s,
            write=settings.write_timeout_s,
            read=None,
            pool=settings.connect_timeout_s,
        )
        self._health_timeout_s = settings.health_timeout_s
        self._kept = self._client(max_keepalive_connections=2 * settings.max_inflight)
        self._fresh = self._client(max_keepalive_connections=0)

    def _client(self, *, max_keepalive_connections: int) -> httpx.AsyncClient:
        return httpx.AsyncClient(
            headers=self._headers,
            timeout=self._timeout,
            trust_env=False,
            follow_redirects=False,
            limits=httpx.Limits(
                max_connections=None,
                max_keepalive_connections=max_keepalive_connections,
                keepalive_expiry=KEEPALIVE_EXPIRY_S,
            ),
        )

    async def aclose(self) -> None:
        """Close every connection."""
        await self._kept.aclose()
        await self._fresh.aclose()

    async def decode(self, worker: Worker, request: DecodeRequest) -> EventStream[DecodeEvent]:
        """Open /v1/decode. The reservation lives exactly as long as the stream is open."""
        return await self._stream(worker, "/v1/decode", request, DecodeEvent)

    async def prefill(self, worker: Worker, request: PrefillRequest) -> EventStream[PrefillEvent]:
        """Open /v1/prefill."""
        return await self._stream(worker, "/v1/prefill", request, PrefillEvent)

    async def stop(self, worker: Worker, request: StopChoices) -> None:
        """Tell a decode worker that these choices need no more tokens."""
        async with self._bounded(worker):
            response = await self._send(worker, "/v1/decode/stop", request)
            try:
                if response.status_code >= 400:
                    raise await _refusal(response, worker)
            finally:
                await response.aclose()

    async def info(self, worker: Worker) -> WorkerInfo:
        """Ask who it is and how it does. Marks it lost if the connection fails."""
        async with self._bounded(worker):
            request = self._kept.build_request("GET", f"{worker.url}/v1/info")
            response = await self._dispatch(worker, request)
            try:
                if response.status_code != 200:
                    raise await _refusal(response, worker)
                return WorkerInfo.model_validate_json(await _limited(response, worker))
            except ValidationError as exc:
                raise BackendError("it does not speak this protocol") from exc
            finally:
                await response.aclose()

    def _bounded(self, worker: Worker) -> _Bounded:
        return _Bounded(self._health_timeout_s, worker)

    async def _stream(self, worker: Worker, path: str, body: Wire, event_type: type[E]) -> EventStream[E]:
        response = await self._send(worker, path, body)
        if response.status_code == 200:
            return EventStream(response, event_type, worker)
        try:
            refusal = await _refusal(response, worker)
        except BaseException:
            await response.aclose()
            raise
        return EventStream(response, event_type, worker, refusal=refusal)

    async def _send(self, worker: Worker, path: str, body: Wire) -> httpx.Response:
        return await self._dispatch(
            worker, self._kept.build_request("POST", f"{worker.url}{path}", content=body.to_json())
        )

    async def _dispatch(self, worker: Worker, request: httpx.Request) -> httpx.Response:
        connected: list[str] = []

        async def note(event: str, _: Any) -> None:
            if event == "connection.connect_tcp.started":
                connected.append(event)

        request.extensions["trace"] = note
        try:
            return await self._kept.send(request, stream=True)
        except httpx.TimeoutException as exc:
            raise from_httpx(exc, worker) from exc
        except httpx.TransportError as exc:
            if connected:
                raise from_httpx(exc, worker) from exc
        try:
            return await self._fresh.send(request, stream=True)
        except httpx.TransportError as exc:
            raise from_httpx(exc, worker) from exc


class _Bounded:
    """A whole small exchange with one time-out, told as BackendTimeout."""

    def __init__(self, limit_s: float, worker: Worker) -> None:
        self._timeout = asyncio.timeout(limit_s)
        self._worker = worker

    async def __aenter__(self) -> None:
        await self._timeout.__aenter__()

    async def __aexit__(self, *exc_info: Any) -> None:
        try:
            await self._timeout.__aexit__(*exc_info)
        except TimeoutError as exc:
            raise BackendTimeout(f"{self._worker.name} did not answer in time") from exc


async def _limited(response: httpx.Response, worker: Worker) -> bytes:
    body = bytearray()
    try:
        async for chunk in response.aiter_raw():
            body += chunk
            if len(body) > MAX_ERROR_BYTES:
                raise BackendError(f"{worker.name} answered too much")
    except httpx.HTTPError as exc:
        raise from_httpx(exc, worker) from exc
    return bytes(body)


async def _refusal(response: httpx.Response, worker: Worker) -> ServingError:
    """A status other than 200 as the error that its body names; its header tells when to come back."""
    body = await _limited(response, worker)
    retry_after = response.headers.get("retry-after")
    return as_our_own(from_error_response(response.status_code, body, retry_after=retry_after))

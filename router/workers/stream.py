"""One worker's NDJSON answer as typed events, and the conversion of everything that a connection can raise.

A stream that ends without a terminal event was cut and is an error, never a success.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from pydantic import ValidationError

from router.workers.connection import ConnectFailed, ConnectTimedOut, TransportError, WriteTimedOut
from router.workers.exchange import Exchange
from router.workers.state import Worker
from shared.asgi.answers import from_error_body
from shared.errors import BackendError, BackendTimeout, Overloaded, ServingError, Unauthorized, UnknownModel
from shared.wire import DecodeEvent, PrefillEvent

MAX_LINE_BYTES = 8 * 2**20

E = TypeVar("E", bound=DecodeEvent | PrefillEvent)


def from_transport(exc: TransportError, worker: Worker) -> BackendError:
    """The one conversion of a connection's errors. A broken one takes the worker out of placement at once."""
    if isinstance(exc, ConnectTimedOut):
        worker.lost("cannot be connected to in time")
        return BackendTimeout(f"{worker.name} could not be connected to in time")
    if isinstance(exc, WriteTimedOut):
        return BackendTimeout(f"{worker.name} did not take the request in time")
    if isinstance(exc, ConnectFailed):
        worker.lost("refuses connections")
        return BackendError(f"{worker.name} refuses connections")
    worker.lost("its connection broke")
    return BackendError(f"the connection to {worker.name} broke")


def as_our_own(exc: ServingError) -> ServingError:
    """A worker's error as the client may be told it: what concerns only us is not shown as the client's fault."""
    if isinstance(exc, Unauthorized | UnknownModel):
        return BackendError("a worker refused the router's request")
    if type(exc) is ServingError:
        return BackendError("a worker failed inside")
    if isinstance(exc, Overloaded) and exc.retry_after_s is None:
        exc.retry_after_s = 1.0
    return exc


class EventStream(Generic[E]):
    """The events of one response. It owns the exchange; closing before the end closes the connection.

    refusal: what a status other than 200 meant; then it is the one thing that `next` has to tell.
    reported: the error that `next` raised was told by the worker itself, not caused by its connection.
    """

    def __init__(
        self,
        exchange: Exchange,
        parse: Callable[[bytes], E],
        worker: Worker,
        *,
        refusal: ServingError | None = None,
    ) -> None:
        self._exchange = exchange
        self._refusal = refusal
        self._parse = parse
        self._worker = worker
        self._lines: deque[bytes] = deque()
        self._rest = bytearray()
        self.ended = False
        self.reported = False

    async def next(self) -> E:
        """The next event. Raises the worker's own error, or BackendError if the stream broke or is garbled."""
        if self._refusal is not None:
            self.ended = self.reported = True
            raise self._refusal
        line = await self._line()
        try:
            event = self._parse(line)
        except ValidationError as exc:
            raise BackendError(f"{self._worker.name} answered what the protocol does not know") from exc
        if event.error is not None:
            self.ended = self.reported = True
            raise as_our_own(from_error_body(event.error))
        if len(event.model_fields_set) != 1:
            raise BackendError(f"{self._worker.name} sent an event that does not hold exactly one thing")
        self.ended = _is_terminal(event)
        return event

    async def settle(self) -> None:
        """After the terminal event: read to the end of the body, so that the connection can serve again."""
        try:
            while await self._exchange.read():
                pass
        except TransportError:
            return  # the connection is not kept then; nothing that was wanted is lost

    def close(self) -> None:
        """Once, and it is done when this returns."""
        self._exchange.close()

    async def _line(self) -> bytes:
        while not self._lines:
            try:
                chunk = await self._exchange.read()
            except TransportError as exc:
                raise from_transport(exc, self._worker) from exc
            if not chunk:
                raise BackendError(f"{self._worker.name} ended its answer too early")
            self._take(chunk)
        return self._lines.popleft()

    def _take(self, chunk: bytes) -> None:
        self._rest += chunk
        if b"\n" in chunk:
            *lines, rest = self._rest.split(b"\n")
            self._lines.extend(bytes(line) for line in lines if line)
            self._rest = rest
        if len(self._rest) > MAX_LINE_BYTES:
            raise BackendError(f"{self._worker.name} sent a line without an end")


def _is_terminal(event: DecodeEvent | PrefillEvent) -> bool:
    return (event.finish if isinstance(event, DecodeEvent) else event.done) is not None

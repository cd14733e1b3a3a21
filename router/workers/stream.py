"""One worker's NDJSON answer as typed events, and the conversion of everything that a connection can raise.

A stream that ends without a terminal event was cut and is an error, never a success.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import Generic, TypeVar

from pydantic import ValidationError

from router.workers.call import Call, TooMuch
from router.workers.connection import ConnectFailed, ConnectTimedOut, Head, TransportError, WriteTimedOut
from router.workers.state import Worker
from shared.asgi.answers import from_error_body, from_error_response
from shared.errors import BackendError, BackendTimeout, Overloaded, ServingError, Unauthorized, UnknownModel
from shared.wire import DecodeEvent, PrefillEvent

MAX_LINE_BYTES = 8 * 2**20
MAX_ANSWER_BYTES = 64 * 2**10
"""Of what is no stream: refusals, and what a worker says of itself."""

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
    if isinstance(exc, TooMuch):
        return BackendError(f"{worker.name} answered too much")
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


def refusal(head: Head, body: bytes) -> ServingError:
    """A status other than 200 as the error that its body names; its header tells when to come back."""
    retry_after = head.headers.get(b"retry-after")
    told = None if retry_after is None else retry_after.decode("latin-1")
    return as_our_own(from_error_response(head.status, body, retry_after=told))


class EventStream(Generic[E]):
    """The events of one response. It owns the call; closing before the end closes the connection.

    ended: the last event has come, or the worker's own error.
    reported: the error that `next` raised was told by the worker itself, not caused by its connection.
    """

    def __init__(self, call: Call, parse: Callable[[bytes], E], worker: Worker) -> None:
        self._call = call
        self._parse = parse
        self._worker = worker
        self._lines: deque[bytes] = deque()
        self._rest = bytearray()
        self.ended = False
        self.reported = False

    def next(self) -> E | None:
        """The next event, None while there is none.

        Raises the worker's own error, or BackendError if the stream broke or is garbled.
        """
        if not self._lines and not self._read():
            return None
        try:
            event = self._parse(self._lines.popleft())
        except ValidationError as exc:
            raise BackendError(f"{self._worker.name} answered what the protocol does not know") from exc
        if event.error is not None:
            self.ended = self.reported = True
            raise as_our_own(from_error_body(event.error))
        if len(event.model_fields_set) != 1:
            raise BackendError(f"{self._worker.name} sent an event that does not hold exactly one thing")
        self.ended = _is_terminal(event)
        return event

    def settled(self) -> bool:
        """After the last event: is the body read to its end, so that the connection can serve again?"""
        try:
            while chunk := self._call.take():
                pass
        except TransportError:
            return True  # the connection is not kept then; nothing that was wanted is lost
        return chunk is not None

    def close(self) -> None:
        """Once, and it is done when this returns."""
        self._call.close()

    def _read(self) -> bool:
        """Take over what has come. True if a whole line is there."""
        try:
            head = self._call.head()
            if head is None:
                return False
            if head.status != 200:
                self._check_refusal(head)
                return False
            chunk = self._call.take()
        except TransportError as exc:
            raise from_transport(exc, self._worker) from exc
        if chunk is None:
            return False
        if not chunk:
            raise BackendError(f"{self._worker.name} ended its answer too early")
        self._take(chunk)
        return bool(self._lines)

    def _check_refusal(self, head: Head) -> None:
        """Raises what the worker refused the request with, once all of it is there."""
        body = self._call.whole(MAX_ANSWER_BYTES)
        if body is not None:
            self.ended = self.reported = True
            raise refusal(head, body)

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

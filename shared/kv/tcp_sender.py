"""Send one hand-off's KV over HTTP on TCP: one PUT, written while later chunks are still being computed.

Blocking; runs in a worker thread of the prefill process, beside the engine thread that feeds `Progress`.
"""

from __future__ import annotations

import contextlib
import socket
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

from pydantic import ValidationError

from shared.errors import (
    BackendError,
    BackendTimeout,
    HandoffError,
    Overloaded,
    ServingError,
    Unauthorized,
    error_table,
)
from shared.kv.encoder import BlobEncoder
from shared.kv.http_head import read_response, request_head
from shared.kv.layout import BlobLayout
from shared.kv.manifest import Manifest
from shared.kv.progress import Progress
from shared.kv.source import KvSource
from shared.kv.stream import Buffer, Interrupted, ReadableWhileSending, Stream
from shared.kv.ticket import TICKET_HEADER, ticket_of
from shared.wire import ErrorBody, Handoff

_PASSED_ON = (HandoffError, Overloaded, Unauthorized)


@dataclass(frozen=True, slots=True)
class SendTimeouts:
    """connect_s: to a listening peer. io_s: for the peer to take half a megabyte; for its answer at the end.

    compute_s: for prefill to bring the next chunk or the first token.
    """

    connect_s: float = 2.0
    io_s: float = 30.0
    compute_s: float = 600.0


@dataclass(frozen=True, slots=True)
class SendStats:
    """A hand-off that decode has verified and injected. Fields as in `shared.wire.Sent`.

    completed_at: when its answer was read, on time.monotonic().
    """

    kv_bytes: int
    wire_bytes: int
    transfer_s: float
    hidden_s: float
    completed_at: float


def send_blob(
    *,
    handoff: Handoff,
    secret: bytes,
    request_id: str,
    manifest: Manifest,
    source: KvSource,
    progress: Progress,
    timeouts: SendTimeouts,
) -> SendStats:
    """Send KV and first tokens to the URL of a verified ticket; returns when decode has injected them.

    Connects at once, so call it when prefill of the request starts: from then on the peer keeps a thread for it.
    Raises Unauthorized; HandoffError (409, 410, 422) or Overloaded when the peer says so; BackendError;
    BackendTimeout; TransferCancelled soon after `progress.cancel`, whatever it was doing.
    """
    url = _split(ticket_of(handoff, secret).kv_url)
    layout = BlobLayout(manifest)
    encoder = BlobEncoder(layout, source)
    head = request_head(
        "PUT",
        url.path,
        {
            "Host": url.netloc,
            "Content-Type": "application/octet-stream",
            "Content-Length": str(layout.total_bytes),
            TICKET_HEADER: handoff.ticket,
            "X-Request-Id": request_id,
        },
    )
    with _foreign_errors(progress), _connected(url, progress, timeouts) as stream:
        sender = _Sender(stream, progress, timeouts)
        try:
            sender.send([head, *encoder.header()])
            for index, (_, end) in enumerate(manifest.chunks):
                progress.wait_computed(end, timeouts.compute_s)
                sender.check_answer()
                for batch in encoder.chunk(index):
                    sender.send(batch)
            first = progress.wait_finished(timeouts.compute_s)
            sender.check_answer()
            sender.send(encoder.trailer(first))
        except (ReadableWhileSending, BrokenPipeError, ConnectionResetError):
            _raise_refusal(*read_response(stream, time.monotonic() + timeouts.io_s))
        status, body = read_response(stream, time.monotonic() + timeouts.io_s)
        if status != 200:
            _raise_refusal(status, body)
        return sender.stats(layout)


class _Sender:
    """Sends, and keeps account of how much of that was hidden behind compute."""

    def __init__(self, stream: Stream, progress: Progress, timeouts: SendTimeouts) -> None:
        self._stream = stream
        self._progress = progress
        self._io_s = timeouts.io_s
        self._hidden_s = 0.0

    def send(self, buffers: Sequence[Buffer]) -> None:
        began = time.monotonic()
        self._stream.send_all(buffers, began + self._io_s)
        ended = time.monotonic()
        finished_at = self._progress.finished_at
        self._hidden_s += max(0.0, (ended if finished_at is None else min(ended, finished_at)) - began)

    def check_answer(self) -> None:
        """An answer before the end is a refusal: notice it before more is sent, or computed, in vain."""
        if self._stream.readable():
            raise ReadableWhileSending

    def stats(self, layout: BlobLayout) -> SendStats:
        now = time.monotonic()
        finished_at = self._progress.finished_at
        assert finished_at is not None
        return SendStats(layout.kv_bytes, layout.total_bytes, now - finished_at, self._hidden_s, now)


@contextlib.contextmanager
def _foreign_errors(progress: Progress) -> Iterator[None]:
    """Turn what sockets raise into our tree; a broken connection after a cancel is the cancel."""
    try:
        yield
    except Interrupted:
        progress.check_cancelled()
        raise
    except TimeoutError as exc:
        progress.check_cancelled()
        raise BackendTimeout("the decode worker did not take the KV in its time") from exc
    except OSError as exc:
        progress.check_cancelled()
        raise BackendError("the connection to the decode worker broke") from exc


def _split(kv_url: str) -> SplitResult:
    try:
        url = urlsplit(kv_url)
        if url.scheme == "http" and url.hostname and url.port:
            return url
    except ValueError as exc:
        raise BackendError("the KV URL cannot be read") from exc
    raise BackendError("the KV URL is not http with a host and a port")


@contextlib.contextmanager
def _connected(url: SplitResult, progress: Progress, timeouts: SendTimeouts) -> Iterator[Stream]:
    """A stream to the first address of the URL's host that answers; `progress.cancel` interrupts it."""
    deadline = time.monotonic() + timeouts.connect_s
    refused: OSError | None = None
    for family, kind, protocol, _, address in socket.getaddrinfo(
        url.hostname, url.port, type=socket.SOCK_STREAM
    ):
        sock = socket.socket(family, kind, protocol)
        sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        stream = Stream(sock)
        try:
            with progress.interrupting(stream.interrupt):
                try:
                    stream.connect(address, deadline)
                except OSError as exc:
                    refused = exc
                    continue
                yield stream
                return
        finally:
            stream.close()
    raise refused or OSError("the KV URL's host has no address")


def _raise_refusal(status: int, body: bytes) -> None:
    """Raise the error that the peer's answer stands for."""
    try:
        error = ErrorBody.model_validate_json(body)
    except ValidationError as exc:
        raise BackendError(f"the decode worker answered {status} to the KV") from exc
    cls: type[ServingError] = error_table().get(error.code, BackendError)
    if not issubclass(cls, _PASSED_ON):
        raise BackendError(f"the decode worker refused the KV: {error.message}")
    raise cls(error.message, retry_after_s=error.retry_after_s)

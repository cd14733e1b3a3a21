"""One PUT of KV as its sender sees it: written while later chunks are computed, answered, and accounted for."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import TypeVar

from pydantic import ValidationError

from shared.errors import (
    BackendError,
    BackendTimeout,
    HandoffError,
    Overloaded,
    ServingError,
    TransportFailed,
    Unauthorized,
    error_table,
)
from shared.kv.encoder import BlobEncoder
from shared.kv.http_head import Answer, read_response, request_head
from shared.kv.layout import BlobLayout
from shared.kv.manifest import Manifest
from shared.kv.progress import Progress
from shared.kv.quant_layout import blob_layout
from shared.kv.shape import WireFormat
from shared.kv.source import KvSource
from shared.kv.stream import ReadableWhileSending
from shared.kv.ticket import KV_PATH, TICKET_HEADER
from shared.kv.transports.base import Connection, Transport
from shared.wire import ErrorBody, Handoff, Sent

T = TypeVar("T")

# How long a peer's refusal may go unnoticed while KV is computed, in vain.
_LOOK_UP_S = 0.25
_PASSED_ON = (HandoffError, Overloaded, TransportFailed, Unauthorized)


@dataclass(frozen=True, slots=True)
class SendTimeouts:
    """connect_s: to a listening peer. io_s: for the peer to take half a megabyte; for its answer at the end, and
    longer if it may still have to copy what it was told of.

    compute_s: for prefill to bring the next chunk or the first token.
    """

    connect_s: float = 2.0
    io_s: float = 30.0
    compute_s: float = 600.0


@dataclass(frozen=True, slots=True)
class Send:
    """What is sent: the KV of one prompt, as `progress` brings it, to where `handoff` says.

    kv_wire: quantised KV that this side would rather send; it does if the other side takes it and the way is slow.
    """

    handoff: Handoff
    request_id: str
    manifest: Manifest
    source: KvSource
    progress: Progress
    kv_wire: WireFormat | None = None

    def layout(self, transport: Transport) -> BlobLayout:
        """The blob for this way."""
        wire = self.kv_wire
        if wire is None or wire != self.handoff.kv_wire or not transport.slower_than_memory:
            return blob_layout(self.manifest)
        return blob_layout(self.manifest.quantised(wire))


class Stale(Exception):
    """A kept connection turned out to be closed: the peer has not seen the PUT."""


class OutgoingPut:
    """One PUT, and the account of how much of it was hidden behind compute."""

    def __init__(
        self, connection: Connection, send: Send, layout: BlobLayout, timeouts: SendTimeouts
    ) -> None:
        self._connection = connection
        self._stream = connection.stream
        self._send = send
        self._layout = layout
        self._timeouts = timeouts
        self._hidden_s = 0.0
        self._waited_s = 0.0

    def run(self, *, kept: bool) -> Answer:
        """Returns the answer 200; raises what any other one stands for, and Stale on a kept connection."""
        try:
            self._write()
        except (ReadableWhileSending, BrokenPipeError, ConnectionResetError) as exc:
            answer = self._read_answer(kept=kept)
            if answer.status == 200:
                raise BackendError("the decode worker answered before it had everything") from exc
        else:
            answer = self._read_answer(kept=kept)
        if answer.status != 200:
            _raise_refusal(answer)
        return answer

    def stats(self, transport: str) -> Sent:
        """After the answer."""
        now = time.monotonic()
        finished_at = self._send.progress.finished_at
        assert finished_at is not None
        layout = self._layout
        return Sent(
            transport=transport,
            kv_bytes=layout.kv_bytes,
            wire_bytes=layout.total_bytes,
            transfer_s=now - finished_at,
            hidden_s=self._hidden_s,
            kv_wire=layout.manifest.kv_wire,
        )

    def _write(self) -> None:
        progress, layout = self._send.progress, self._layout
        encoder = BlobEncoder(layout, self._send.source, self._connection.scratch, self._wait_layers)
        head = request_head("PUT", KV_PATH + self._send.handoff.handoff_id, self._head_fields())
        began = time.monotonic()
        opening = b"".join((head, *self._connection.opening(encoder)))
        self._connection.send_head(opening, began + self._timeouts.io_s)
        self._account(began)
        for index in range(len(layout.manifest.chunks)):
            began, self._waited_s = time.monotonic(), 0.0
            self._connection.send_chunk(encoder, index, self._timeouts.io_s)
            self._account(began + self._waited_s)
        trailer = encoder.trailer()
        self._check_answer()
        first = self._until(progress.wait_finished)
        began = time.monotonic()
        self._stream.send_all([trailer.of(first)], began + self._timeouts.io_s)
        self._account(began)

    def _wait_layers(self, index: int, num_layers: int) -> int:
        """Until so many layers of a chunk can be read; returns how many can."""
        began = time.monotonic()
        manifest, progress = self._layout.manifest, self._send.progress
        end = manifest.chunks[index][1]
        complete = self._until(lambda timeout_s: progress.wait_layers(end, num_layers, timeout_s))
        self._check_answer()
        self._waited_s += time.monotonic() - began
        return manifest.shape.num_layers if complete else num_layers

    def _until(self, wait: Callable[[float], T]) -> T:
        """What `wait`, for so many seconds, waits for. An answer in long waits ends it: it is a refusal then."""
        due = time.monotonic() + self._timeouts.compute_s
        while True:
            left_s = due - time.monotonic()
            try:
                return wait(min(_LOOK_UP_S, left_s))
            except BackendTimeout:
                self._check_answer()
                if left_s <= _LOOK_UP_S:
                    raise

    def _head_fields(self) -> dict[str, str]:
        return {
            "Host": "handoff-decode",
            "Connection": "keep-alive",
            "Content-Type": "application/octet-stream",
            "Content-Length": str(self._connection.body_bytes(self._layout)),
            TICKET_HEADER: self._send.handoff.ticket,
            "X-Request-Id": self._send.request_id,
            **self._connection.head_fields(),
        }

    def _read_answer(self, *, kept: bool) -> Answer:
        answer_s = self._connection.await_answer(self._timeouts.io_s)
        answer = read_response(self._stream, time.monotonic() + answer_s)
        if answer is not None:
            return answer
        self._send.progress.check_cancelled()
        if kept:
            raise Stale
        raise BackendError("the decode worker hung up without an answer")

    def _check_answer(self) -> None:
        """Notice a refusal before more is sent, or computed, in vain. Raises ReadableWhileSending."""
        if self._stream.readable():
            raise ReadableWhileSending

    def _account(self, began: float) -> None:
        """Something was sent since then, waits for compute left out: how much of it did compute hide?"""
        finished_at = self._send.progress.finished_at
        hidden_until = time.monotonic() if finished_at is None else min(time.monotonic(), finished_at)
        self._hidden_s += max(0.0, hidden_until - began)


def _raise_refusal(answer: Answer) -> None:
    """Raise the error that the peer's answer stands for."""
    try:
        error = ErrorBody.model_validate_json(answer.body)
    except ValidationError as exc:
        raise BackendError(f"the decode worker answered {answer.status} to the KV") from exc
    cls: type[ServingError] = error_table().get(error.code, BackendError)
    if not issubclass(cls, _PASSED_ON):
        raise BackendError(f"the decode worker refused the KV: {error.message}")
    raise cls(error.message, retry_after_s=error.retry_after_s)

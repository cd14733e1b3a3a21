"""Cutting a connection whose other side has stopped reading.

A server that waits for such a one to take the rest of its answer waits for as long as it keeps the socket open,
and holds all that belongs to the request meanwhile.
"""

from __future__ import annotations

import asyncio

import structlog

SEND_TIMEOUT_S = 60.0
_LOOKS = 4  # within the time-out: how far it may be overrun is a fraction of it
_log = structlog.get_logger(__name__)


class StallWatch:
    """Aborts `transport` when it has given nothing of what is written to the other side for `timeout_s`.

    Slow is not stalled: whoever takes any of it starts the time anew. What is taken is what the kernel took, in
    steps of up to some hundred kilobytes. Source: nginx, send_timeout, which is 60 s between two writes.
    """

    def __init__(
        self, transport: asyncio.Transport, loop: asyncio.AbstractEventLoop, timeout_s: float
    ) -> None:
        self._transport = transport
        self._loop = loop
        self._timeout_s = timeout_s
        self._unsent = 0  # bytes, at the last look
        self._idle_looks = 0
        self._timer: asyncio.TimerHandle | None = None

    def begin(self) -> None:
        """More is written than the other side takes for now."""
        self.end()
        self._unsent = self._transport.get_write_buffer_size()
        self._idle_looks = 0
        self._wait()

    def end(self) -> None:
        """It has been taken, or the connection is gone. Idempotent."""
        if self._timer is not None:
            self._timer.cancel()
            self._timer = None

    def _wait(self) -> None:
        self._timer = self._loop.call_later(self._timeout_s / _LOOKS, self._look)

    def _look(self) -> None:
        unsent = self._transport.get_write_buffer_size()
        self._idle_looks = 0 if unsent < self._unsent else self._idle_looks + 1
        self._unsent = unsent
        if self._idle_looks < _LOOKS:
            self._wait()
            return
        self._timer = None
        _log.info("connection_stalled", unsent_bytes=unsent, timeout_s=self._timeout_s)
        self._transport.abort()

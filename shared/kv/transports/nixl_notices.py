"""Prefill's side while decode reads: drives the library, and tells each connection how much was read.

Reads over a network that needs the other side's help, and the first contact, go on only while the library is
called. So one thread calls it every tenth of a millisecond, but only while a peer still has something to read:
while prefill computes, and when nothing is under way, it sleeps.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time

from shared.kv.transports.nixl_agent import NixlAgent, ReadFailed
from shared.kv.transports.nixl_wire import unpack_notice

_PERIOD_S = 0.0001


class Reading:
    """What a peer was told of and has read, on one connection; `event` is an eventfd that tells of news."""

    def __init__(self) -> None:
        self.told_bytes = 0
        self.read_bytes = 0
        self.failure: ReadFailed | None = None
        self.event = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)

    @property
    def is_due(self) -> bool:
        """Whether the peer still has something to read. After a failure nobody can tell."""
        return self.failure is None and self.read_bytes < self.told_bytes

    def drain(self) -> None:
        """Make the event wait for the next news."""
        with contextlib.suppress(BlockingIOError):
            os.eventfd_read(self.event)


class Notices:
    """Thread-safe. Its thread lives from the first connection to `close`.

    If the library fails, whatever is being read then has failed; the next reading is a new try.
    """

    def __init__(self, agent: NixlAgent) -> None:
        self._agent = agent
        self._changed = threading.Condition()
        self._readings: dict[bytes, Reading] = {}
        self._closed = False
        self._thread: threading.Thread | None = None

    def open(self, token: bytes) -> Reading:
        """A new connection, under a token of its own."""
        with self._changed:
            self._readings[token] = reading = Reading()
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="kv-nixl", daemon=True)
                self._thread.start()
        return reading

    def tell(self, reading: Reading, num_bytes: int) -> None:
        """The peer will read so much more."""
        with self._changed:
            reading.told_bytes += num_bytes
            self._changed.notify_all()

    def settle(self, reading: Reading) -> None:
        """The peer has answered, or will: it reads nothing more, whatever it still has to tell."""
        with self._changed:
            reading.read_bytes = reading.told_bytes
            reading.failure = None

    def forget(self, token: bytes) -> None:
        """The connection is over."""
        with self._changed:
            reading = self._readings.pop(token)
            os.close(reading.event)

    def close(self) -> None:
        """End the thread."""
        with self._changed:
            self._closed = True
            self._changed.notify_all()
        if self._thread is not None:
            self._thread.join()

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._closed or self._any_due())
                if self._closed:
                    return
            try:
                for content in self._agent.notices():
                    self._take(content)
            except ReadFailed as exc:
                self._fail(exc)
            time.sleep(_PERIOD_S)

    def _fail(self, failure: ReadFailed) -> None:
        with self._changed:
            for reading in self._readings.values():
                if reading.is_due:
                    reading.failure = failure
                    os.eventfd_write(reading.event, 1)

    def _any_due(self) -> bool:
        return any(reading.is_due for reading in self._readings.values())

    def _take(self, content: bytes) -> None:
        notice = unpack_notice(content)
        if notice is None:
            return
        token, read_bytes = notice
        with self._changed:
            reading = self._readings.get(token)
            if reading is not None and read_bytes > reading.read_bytes:
                reading.read_bytes = min(read_bytes, reading.told_bytes)
                os.eventfd_write(reading.event, 1)

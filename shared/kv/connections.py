"""Connections to decode workers, kept for the next hand-off: a new one costs as much as sending some megabytes."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

from shared.kv.transports.base import Connection

Key = tuple[str, str]


@dataclass(frozen=True, slots=True)
class _Idle:
    connection: Connection
    since: float


class ConnectionPool:
    """Idle connections by transport and address. Thread-safe.

    max_idle: of all addresses together. idle_s: shorter than the receiver waits for another PUT.
    """

    def __init__(
        self, *, max_idle: int = 16, idle_s: float = 30.0, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._max_idle = max_idle
        self._idle_s = idle_s
        self._clock = clock
        self._lock = threading.Lock()
        self._idle: list[tuple[Key, _Idle]] = []
        self._closed = False

    def take(self, key: Key) -> Connection | None:
        """The connection that was used last, if one is left that the peer has not closed."""
        while True:
            with self._lock:
                stale = self._expired()
                found = self._newest(key)
            for connection in stale:
                connection.close()
            # An idle peer has nothing to say: it has hung up.
            if found is None or not found.stream.readable():
                return found
            found.close()

    def give_back(self, key: Key, connection: Connection) -> None:
        """Keep a connection whose PUT was answered with 200 and which the peer keeps too."""
        with self._lock:
            surplus = [connection]
            if not self._closed:
                self._idle.append((key, _Idle(connection, self._clock())))
                surplus = [idle.connection for _, idle in self._idle[: -self._max_idle]]
                del self._idle[: -self._max_idle]
        for connection in surplus:
            connection.close()

    def close_one(self) -> bool:
        """Close the connection that was idle longest: somebody needs what it holds. False if there is none."""
        with self._lock:
            oldest = self._idle.pop(0)[1].connection if self._idle else None
        if oldest is not None:
            oldest.close()
        return oldest is not None

    def close(self) -> None:
        """Close all, and every one that still comes back."""
        with self._lock:
            self._closed = True
            idle, self._idle = self._idle, []
        for _, one in idle:
            one.connection.close()

    def _newest(self, key: Key) -> Connection | None:
        for at in range(len(self._idle) - 1, -1, -1):
            if self._idle[at][0] == key:
                return self._idle.pop(at)[1].connection
        return None

    def _expired(self) -> list[Connection]:
        """They stand in the order in which they came back."""
        due, stale = self._clock() - self._idle_s, []
        while self._idle and self._idle[0][1].since <= due:
            stale.append(self._idle.pop(0)[1].connection)
        return stale

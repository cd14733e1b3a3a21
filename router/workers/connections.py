"""Connections to one worker, kept for the next request.

No limit on open ones: admission already bounds the requests, and a limit here would only be a second, hidden queue.
"""

from __future__ import annotations

import asyncio
import ssl
from collections import deque
from dataclasses import dataclass
from functools import partial
from time import monotonic
from urllib.parse import urlsplit

from router.workers.connection import ConnectFailed, Connection, ConnectTimedOut

KEEPALIVE_EXPIRY_S = 30.0
"""Well below the 75 s after which a worker's server closes an idle connection."""


@dataclass(frozen=True, slots=True)
class Address:
    """Where a worker's URL leads. authority: for the Host header. path: what precedes every path."""

    host: str
    port: int
    authority: str
    path: str
    is_tls: bool

    @classmethod
    def of(cls, url: str) -> Address:
        """Raises ValueError if there is no host in it, or an impossible port."""
        parts = urlsplit(url)
        is_tls = parts.scheme == "https"
        if not parts.hostname:
            raise ValueError("a worker address without a host")
        port = parts.port or (443 if is_tls else 80)
        return cls(parts.hostname, port, parts.netloc.rpartition("@")[2], parts.path, is_tls)


class Connections:
    """Newest first, so that the ones that are not needed any more grow old. At most `max_idle` are kept.

    ssl_context: for https; None if the address is plain.
    """

    def __init__(
        self,
        address: Address,
        *,
        max_idle: int,
        connect_timeout_s: float,
        write_timeout_s: float,
        ssl_context: ssl.SSLContext | None,
    ) -> None:
        self.address = address
        self._max_idle = max_idle
        self._connect_timeout_s = connect_timeout_s
        self._make = partial(Connection, write_timeout_s=write_timeout_s)
        self._ssl_context = ssl_context
        self._idle: deque[tuple[float, Connection]] = deque()

    def kept(self) -> Connection | None:
        """A connection that has served before and is not known to be closed; None if there is none."""
        while self._idle and monotonic() - self._idle[-1][0] < KEEPALIVE_EXPIRY_S:
            connection = self._idle.pop()[1]
            if connection.reusable:
                return connection
        return None

    async def fresh(self) -> Connection:
        """A new connection. Raises ConnectFailed, ConnectTimedOut."""
        loop = asyncio.get_running_loop()
        try:
            async with asyncio.timeout(self._connect_timeout_s):
                _, connection = await loop.create_connection(
                    self._make, self.address.host, self.address.port, ssl=self._ssl_context
                )
        except TimeoutError as exc:
            raise ConnectTimedOut(str(exc)) from exc
        except (OSError, UnicodeError) as exc:  # UnicodeError: a host name that cannot be one
            raise ConnectFailed(str(exc)) from exc
        return connection

    def give(self, connection: Connection) -> None:
        """Keep a connection whose response is over, and close those that have been idle for too long."""
        if not connection.reusable:
            connection.close()
            return
        connection.rest()
        now = monotonic()
        self._idle.append((now, connection))
        while len(self._idle) > self._max_idle or now - self._idle[0][0] >= KEEPALIVE_EXPIRY_S:
            self._idle.popleft()[1].close()

    def close(self) -> None:
        """Close what is idle."""
        while self._idle:
            self._idle.pop()[1].close()

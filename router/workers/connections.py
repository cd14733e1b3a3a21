"""Kept connections to one worker, each an httpx transport of its own.

NOTE: httpcore's pool looks at every connection for every other one at each request (seen with 1.0): with 240 open
streams that was 25 ms of CPU per request. A pool of one connection has nothing to look through.
No limit on open ones: admission already bounds the requests, and a limit here would only be a second, hidden queue.
"""

from __future__ import annotations

import ssl
from collections import deque
from time import monotonic

import httpx

KEEPALIVE_EXPIRY_S = 30.0
"""Well below the 75 s after which a worker's server closes an idle connection."""


class Connections:
    """Newest first, so that the ones that are not needed any more grow old. At most `max_idle` are kept."""

    def __init__(self, *, max_idle: int, ssl_context: ssl.SSLContext) -> None:
        self._max_idle = max_idle
        self._ssl_context = ssl_context
        self._idle: deque[tuple[float, httpx.AsyncHTTPTransport]] = deque()

    def kept(self) -> httpx.AsyncHTTPTransport | None:
        """A connection that has served before; None if there is none."""
        if self._idle and monotonic() - self._idle[-1][0] < KEEPALIVE_EXPIRY_S:
            return self._idle.pop()[1]
        return None

    def fresh(self) -> httpx.AsyncHTTPTransport:
        """A connection yet to be made."""
        limits = httpx.Limits(
            max_connections=1, max_keepalive_connections=1, keepalive_expiry=KEEPALIVE_EXPIRY_S
        )
        return httpx.AsyncHTTPTransport(verify=self._ssl_context, trust_env=False, limits=limits)

    async def give(self, connection: httpx.AsyncHTTPTransport) -> None:
        """Keep a connection whose response is over, and close those that have been idle for too long."""
        now = monotonic()
        self._idle.append((now, connection))
        while self._idle and (
            len(self._idle) > self._max_idle or now - self._idle[0][0] >= KEEPALIVE_EXPIRY_S
        ):
            await self._idle.popleft()[1].aclose()

    async def aclose(self) -> None:
        """Close what is idle."""
        while self._idle:
            await self._idle.pop()[1].aclose()

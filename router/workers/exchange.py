"""A response and the connection that it came on, which are given up together."""

from __future__ import annotations

import httpx

from router.workers.connections import Connections
from shared.asgi.disconnect import finish


class Exchange:
    """Owned by whoever reads the response, until it closes it."""

    def __init__(
        self, response: httpx.Response, connection: httpx.AsyncHTTPTransport, connections: Connections
    ) -> None:
        self.response = response
        self._connection = connection
        self._connections = connections
        self._closed = False

    async def aclose(self) -> None:
        """Close exactly once, to the end, even if the caller is cancelled meanwhile.

        A response that was not read to its end takes its connection with it, which cancels the work behind it.
        """
        if not self._closed:
            self._closed = True
            await finish(self._close())

    async def _close(self) -> None:
        try:
            await self.response.aclose()
        except httpx.HTTPError:
            await self._connection.aclose()
        else:
            await self._connections.give(self._connection)

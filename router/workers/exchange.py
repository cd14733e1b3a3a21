"""A response and the connection that it comes on, which are given up together."""

from __future__ import annotations

from router.workers.connection import Connection, Head
from router.workers.connections import Connections


class Exchange:
    """Owned by whoever reads the response, until it closes it."""

    def __init__(self, head: Head, connection: Connection, connections: Connections) -> None:
        self.head = head
        self._connection = connection
        self._connections = connections
        self._closed = False

    async def read(self) -> bytes:
        """What of the body has come since the last call; b"" at its end. Raises TransportError."""
        return await self._connection.read()

    def close(self) -> None:
        """Once, and it is done when this returns.

        A response that was not read to its end takes its connection with it, which cancels the work behind it.
        """
        if not self._closed:
            self._closed = True
            self._connections.give(self._connection)

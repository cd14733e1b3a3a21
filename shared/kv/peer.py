"""An accepted connection as PUTs see it: its stream, and what is kept of it from one PUT to the next."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import ExitStack

from shared.errors import InvalidRequest
from shared.kv.carrier import Carrier, MakeCarrier
from shared.kv.http_head import RequestHead, read_head
from shared.kv.pieces import Scratch
from shared.kv.stream import Stream
from shared.kv.transports import tcp

_MOST_DESCRIPTORS = 2


class Peer:
    """Used by one thread. transport: of its listening socket. carriers: by the head's field, in lower case.

    has_ticket: it has shown a valid one, now or earlier. gives_way: told by the listener, with an interrupt, that
    another connection needs its place. Both may be read, and the latter set, by any thread.
    """

    def __init__(self, stream: Stream, transport: str, carriers: Mapping[str, MakeCarrier]) -> None:
        self.stream = stream
        self.transport = transport
        self.scratch = Scratch()
        self.has_ticket = False
        self.gives_way = False
        self._carriers = carriers
        self._carrier: Carrier | None = None
        self._made_of = ""
        self._descriptors: list[int] = []

    def read_head(self, max_bytes: int, deadline: float) -> tuple[RequestHead, bytes]:
        """The head of the next PUT, and what came after it. Raises as `shared.kv.http_head.read_head`."""
        return read_head(self._read_some, max_bytes, deadline)

    def carrier_for(self, head: RequestHead) -> Carrier | None:
        """What brings the chunks of this PUT if its body does not. Raises InvalidRequest.

        Made of what came along with the head, or found as it was made for an earlier one.
        """
        for field, make in self._carriers.items():
            if field not in head.headers:
                continue
            text = head.headers[field]
            if self._carrier is None:
                self._carrier, self._made_of = make(text, self._descriptors), field
            if field != self._made_of:
                raise InvalidRequest("a connection keeps the way that its KV goes")
            self._carrier.next_put(text)
            return self._carrier
        return None

    def drop_descriptors(self) -> None:
        """Close what came along with the head and was not used."""
        descriptors, self._descriptors = self._descriptors, []
        for descriptor in descriptors:
            os.close(descriptor)

    def close(self) -> None:
        """Give everything back, whatever of it fails."""
        with ExitStack() as held:
            for part in (self._carrier, self.stream):
                if part is not None:
                    held.callback(part.close)

    def _read_some(self, buffer: memoryview, deadline: float) -> int:
        """Bytes of the head; over a Unix socket descriptors may come with them."""
        if self.transport == tcp.NAME:
            return self.stream.recv_into([buffer], deadline)
        num_bytes, descriptors = self.stream.recv_descriptors(buffer, _MOST_DESCRIPTORS, deadline)
        self._descriptors += descriptors
        if len(self._descriptors) > _MOST_DESCRIPTORS:
            raise InvalidRequest("too many descriptors came along")
        return num_bytes

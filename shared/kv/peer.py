"""An accepted connection as PUTs see it: its stream, and what is kept of it from one PUT to the next."""

from __future__ import annotations

import os
from contextlib import ExitStack

from shared.errors import InvalidRequest
from shared.kv.carrier import Carrier
from shared.kv.http_head import RequestHead, read_head
from shared.kv.pieces import Scratch
from shared.kv.segment import SegmentShape
from shared.kv.stream import Stream
from shared.kv.transports import nixl_wire, shm, tcp
from shared.kv.transports.nixl_peers import NixlPeers
from shared.kv.transports.nixl_reads import NixlCarrier
from shared.kv.transports.shm import MappedSegment


class Peer:
    """Used by one thread. transport: of its listening socket. nixl: if KV may be read over NIXL."""

    def __init__(self, stream: Stream, transport: str, nixl: NixlPeers | None = None) -> None:
        self.stream = stream
        self.transport = transport
        self.scratch = Scratch()
        self._segment: MappedSegment | None = None
        self._nixl = nixl
        self._reads: NixlCarrier | None = None
        self._descriptors: list[int] = []

    def read_head(self, max_bytes: int, deadline: float) -> tuple[RequestHead, bytes]:
        """The head of the next PUT, and what came after it. Raises as `shared.kv.http_head.read_head`."""
        return read_head(self._read_some, max_bytes, deadline)

    def carrier_for(self, head: RequestHead) -> Carrier | None:
        """What brings the chunks of this PUT if its body does not. Raises InvalidRequest.

        Made of what came along with the head, or found as it was made for an earlier one.
        """
        if (text := head.headers.get(nixl_wire.HEADER.lower())) is not None:
            return self._reads_for(nixl_wire.Terms.parse(text))
        if (text := head.headers.get(shm.SEGMENT_HEADER.lower())) is not None:
            return self._segment_for(SegmentShape.parse(text))
        return None

    def drop_descriptors(self) -> None:
        """Close what came along with the head and was not used."""
        descriptors, self._descriptors = self._descriptors, []
        for descriptor in descriptors:
            os.close(descriptor)

    def close(self) -> None:
        """Give everything back, whatever of it fails."""
        with ExitStack() as held:
            for part in (self._segment, self._reads, self.stream):
                if part is not None:
                    held.callback(part.close)

    def _read_some(self, buffer: memoryview, deadline: float) -> int:
        """Bytes of the head; over a Unix socket a segment's descriptors may come with them."""
        if self.transport == tcp.NAME:
            return self.stream.recv_into([buffer], deadline)
        num_bytes, descriptors = self.stream.recv_descriptors(buffer, shm.NUM_DESCRIPTORS, deadline)
        self._descriptors += descriptors
        return num_bytes

    def _segment_for(self, shape: SegmentShape) -> MappedSegment:
        if self._segment is None:
            descriptors, self._descriptors = self._descriptors, []
            self._segment = MappedSegment(descriptors, shape)
        if self._segment.segment.shape != shape:
            raise InvalidRequest("a connection keeps its segment")
        return self._segment

    def _reads_for(self, terms: nixl_wire.Terms) -> NixlCarrier:
        if self._nixl is None:
            raise InvalidRequest("KV is not read over NIXL here")
        if self._reads is None:
            self._reads = NixlCarrier(self._nixl, terms)
        self._reads.next_put(terms)
        return self._reads

"""Wire to pool: reads a blob to where it must land, and believes nothing of it until it is whole.

Size, manifest and tensor list are checked when the header is complete, before the sink is asked for anything.
Digests are checked when the trailer is complete. Every failure is final for the decoder.
"""

from __future__ import annotations

from typing import Protocol

from shared.errors import InvalidRequest, ManifestMismatch
from shared.kv.batch import BATCH_TENSORS
from shared.kv.book import Received
from shared.kv.header import LENGTH, claimed_chunks, claims_quantised, json_length, parse_header
from shared.kv.layout import BlobLayout
from shared.kv.manifest import Chunk, Expected, Manifest, check
from shared.kv.pieces import ChunkBytes, Scratch
from shared.kv.quant_chunk import QuantChunk
from shared.kv.quant_layout import QuantLayout, blob_layout
from shared.kv.section import Receive, Section, read_section
from shared.kv.source import KvSink
from shared.kv.trailer import Trailer


class Slots(Protocol):
    """How the bytes of chunks arrive if not in the stream itself."""

    def body_bytes(self, header_bytes: int, layout: BlobLayout) -> int:
        """How long the stream of this blob is."""
        ...

    def begin(self, layout: BlobLayout) -> None:
        """Called once, when the header is accepted: take what stands in the stream before the first chunk."""
        ...

    def fill(self, target: ChunkBytes) -> None:
        """Bring one chunk to where it belongs, and digest it, in file order."""
        ...


class BlobDecoder:
    """One blob into one sink.

    total_bytes: how long the carrier says that its stream is; any other length is refused.
    max_header_bytes: for length and JSON together.
    slots: where the chunks' bytes are; None if they are in the stream.
    """

    def __init__(
        self,
        expected: Expected,
        sink: KvSink,
        *,
        total_bytes: int,
        max_header_bytes: int,
        slots: Slots | None = None,
        scratch: Scratch | None = None,
    ) -> None:
        self._expected = expected
        self._sink = sink
        self._total_bytes = total_bytes
        self._max_header_bytes = min(max_header_bytes, total_bytes)
        self._slots = slots
        self._scratch = scratch or Scratch()

    def read(self, receive: Receive) -> Received:
        """The whole blob; its content is verified then.

        Raises InvalidRequest, ManifestMismatch or DigestMismatch as soon as something is wrong, and what `receive`
        raises.
        """
        prefix = read_section(receive, LENGTH.size)
        header = bytes(prefix + read_section(receive, json_length(prefix, self._max_header_bytes)))
        layout = self._accept(header)
        if self._slots is not None:
            self._slots.begin(layout)
        digests: list[int] = []
        for chunk in layout.manifest.chunks:
            if isinstance(layout, QuantLayout):
                digests += self._quantised_chunk(layout, chunk, receive)
            else:
                digests += self._chunk(layout, chunk, receive)
        trailer = Trailer(layout, digests, header)
        first = trailer.read(read_section(receive, layout.trailer_bytes))
        wire_bytes = len(header) + layout.data_bytes
        return Received(first, layout.kv_bytes, wire_bytes, layout.manifest.kv_wire)

    def _fill(self, views: list[memoryview], section: Section, receive: Receive) -> None:
        """Read until every view is full."""
        first = 0
        while True:
            while first < len(views) and not len(views[first]):
                first += 1
            if first == len(views):
                return
            num_bytes = receive(views[first : first + BATCH_TENSORS], section)
            if not num_bytes:
                raise InvalidRequest("the blob ended too early")
            section.taken_bytes += num_bytes
            while first < len(views) and num_bytes >= len(views[first]):
                num_bytes -= len(views[first])
                first += 1
            if num_bytes:
                views[first] = views[first][num_bytes:]

    def _accept(self, header: bytes) -> BlobLayout:
        """Everything that can be known before KV is written."""
        layout = _as_we_would_write_it(header, self._expected)
        if layout is None:
            manifest, entries = parse_header(header[LENGTH.size :])
            check(manifest, self._expected)
            layout = blob_layout(manifest)
            layout.check_entries(entries)
        body_bytes = len(header) + layout.data_bytes
        if self._slots is not None:
            if layout.manifest.kv_wire is not None:
                raise ManifestMismatch("quantised KV comes in the stream itself")
            body_bytes = self._slots.body_bytes(len(header), layout)
        if body_bytes != self._total_bytes:
            raise ManifestMismatch("the blob's length is not what its manifest implies")
        return layout

    def _chunk(self, layout: BlobLayout, chunk: Chunk, receive: Receive) -> list[int]:
        """Read one chunk into the sink; the digests of its tensors as they arrived."""
        target = ChunkBytes(self._sink, layout, chunk)
        if self._slots is not None:
            self._slots.fill(target)
        else:
            for batch in target.batches():
                section = Section(batch.num_bytes)
                if target.scattered:
                    memory = self._scratch.take(batch.num_bytes)
                    self._fill([memory], section, receive)
                    target.copy_in(batch, memory)
                else:
                    views = target.views(batch)
                    self._fill([view for own in views for view in own], section, receive)
                    target.digest(batch, views)
        self._sink.chunk_filled(*chunk)
        return target.digests

    def _quantised_chunk(self, layout: QuantLayout, chunk: Chunk, receive: Receive) -> list[int]:
        """The same for a chunk that travels quantised."""
        target = QuantChunk(self._sink, layout, chunk)
        for batch in target.batches():
            memory = self._scratch.take(batch.num_bytes)
            self._fill([memory], Section(batch.num_bytes), receive)
            target.copy_in(batch, memory)
        self._sink.chunk_filled(*chunk)
        return target.digests


def _as_we_would_write_it(header: bytes, expected: Expected) -> BlobLayout | None:
    """The layout, if the header is byte for byte what this code writes for the reservation; else look closer.

    It nearly always is, and comparing bytes is several times cheaper than comparing what they mean. Only the chunk
    list is the sender's choice: it is read from the header, all else of it follows.
    """
    chunks = claimed_chunks(header)
    if chunks is None:
        return None
    try:
        layout = blob_layout(Manifest.of(expected, chunks, quantised=claims_quantised(header)))
    except ValueError:
        return None
    return layout if layout.header == header else None

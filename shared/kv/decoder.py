"""Wire to pool: says where the next bytes of a blob must land, and believes nothing of it until it is whole.

Pull-style, so that a transport reads from its socket straight into the pool:

    while buffers := decoder.next_buffers():
        decoder.advance(recvmsg_into(buffers))
    received = decoder.result()

Size, manifest and tensor list are checked when the header is complete, before the sink is asked for anything.
Digests are checked when the trailer is complete. Every failure is final for the decoder.
"""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import islice, repeat

from xxhash import xxh3_64, xxh3_64_intdigest

from shared.errors import DigestMismatch, InvalidRequest, InvariantBroken, ManifestMismatch
from shared.kv.book import Received
from shared.kv.layout import LENGTH, BlobLayout, KvPart, json_length, parse_header
from shared.kv.manifest import Expected, check
from shared.kv.progress import FirstTokens
from shared.kv.source import KvSink

WINDOW_BYTES = 512 * 1024
WINDOW_VIEWS = 256
_MAX_TOKEN_ID = 2**31

# Views that are one tensor, and its digest; plain buffers (header, trailer) are digested when they are complete.
_Stretch = tuple[Sequence[memoryview], xxh3_64 | None]


@dataclass(slots=True)
class Section:
    """What a sender can send without waiting for anything: length, JSON, one chunk, or the trailer."""

    num_bytes: int
    taken_bytes: int = 0


class BlobDecoder:
    """One blob into one sink.

    total_bytes: how long the carrier says the blob is; any other length is refused.
    max_header_bytes: for length and JSON together.
    """

    def __init__(self, expected: Expected, sink: KvSink, *, total_bytes: int, max_header_bytes: int) -> None:
        self._expected = expected
        self._sink = sink
        self._total_bytes = total_bytes
        self._max_header_bytes = min(max_header_bytes, total_bytes)
        self._taken_bytes = 0
        self._views: deque[memoryview] = deque()
        self._digests: deque[xxh3_64 | None] = deque()
        self._window_bytes = 0
        self._stretches: Iterator[_Stretch] = iter(())
        self._received: Received | None = None
        self._sections = self._read()
        self.section = Section(0)
        self._refill()

    def next_buffer(self) -> memoryview | None:
        """Where the next bytes must land; None when the blob is complete."""
        return self._views[0] if self._views else None

    def next_buffers(self) -> list[memoryview]:
        """The same as a scatter list of bounded length; empty when the blob is complete."""
        return list(islice(self._views, WINDOW_VIEWS))

    def advance(self, num_bytes: int) -> None:
        """`num_bytes` have been written into the buffers, in order.

        Raises InvalidRequest, ManifestMismatch or DigestMismatch when they complete something that is wrong.
        """
        if not 0 <= num_bytes <= self._window_bytes:
            raise InvariantBroken(f"{num_bytes} bytes were read where {self._window_bytes} had room")
        self._taken_bytes += num_bytes
        self.section.taken_bytes += num_bytes
        self._window_bytes -= num_bytes
        views, digests = self._views, self._digests
        while num_bytes:
            view, digest = views[0], digests[0]
            if len(view) <= num_bytes:
                views.popleft()
                digests.popleft()
            else:
                views[0] = view[num_bytes:]
                view = view[:num_bytes]
            if digest is not None:
                digest.update(view)
            num_bytes -= len(view)
        self._refill()

    def result(self) -> Received:
        """The verified content. Raises InvalidRequest if the blob ended early."""
        if self._received is None:
            raise InvalidRequest(f"the blob ended after {self._taken_bytes} of {self._total_bytes} bytes")
        return self._received

    def _refill(self) -> None:
        """Keep the window filled from this section; when that is full, go on to the next."""
        while self._window_bytes < WINDOW_BYTES:
            stretch = next(self._stretches, None)
            if stretch is not None:
                views, digest = stretch
                self._views.extend(views)
                self._digests.extend(repeat(digest, len(views)))
                self._window_bytes += sum(map(len, views))
            elif self._views:
                return
            else:
                section = next(self._sections, None)
                if section is None:
                    return
                self.section, self._stretches = section

    def _read(self) -> Iterator[tuple[Section, Iterator[_Stretch]]]:
        """The blob from front to back. Resumed each time that the section it gave out is full."""
        prefix = bytearray(LENGTH.size)
        yield _plain(prefix)
        content = bytearray(json_length(prefix, self._max_header_bytes))
        yield _plain(content)
        layout = self._accept(content)
        digests = []
        for parts in layout.chunks:
            tensors = [xxh3_64() for _ in parts]
            yield Section(sum(part.span.nbytes for part in parts)), self._chunk(parts, tensors)
            digests += [tensor.intdigest() for tensor in tensors]
            self._sink.chunk_filled(parts[0].start, parts[0].end)
        trailer = bytearray(layout.trailer_bytes)
        yield _plain(trailer)
        header_digest = xxh3_64(prefix)
        header_digest.update(content)
        first = _check_trailer(layout, trailer, digests, header_digest.intdigest())
        self._received = Received(first, layout.kv_bytes, self._total_bytes)

    def _accept(self, content: bytearray) -> BlobLayout:
        """Everything that can be known before KV is written."""
        manifest, entries = parse_header(content)
        check(manifest, self._expected)
        layout = BlobLayout(manifest)
        layout.check_entries(entries)
        if self._taken_bytes + layout.data_bytes != self._total_bytes:
            raise ManifestMismatch("the blob's length is not what its manifest implies")
        return layout

    def _chunk(self, parts: list[KvPart], digests: list[xxh3_64]) -> Iterator[_Stretch]:
        for part, digest in zip(parts, digests, strict=True):
            views = [
                view for view in self._sink.views(part.layer, part.kind, part.start, part.end) if len(view)
            ]
            if sum(map(len, views)) != part.span.nbytes:
                raise InvariantBroken(f"the sink's views are not the size of {part.span.name}")
            yield views, digest


def _plain(buffer: bytearray) -> tuple[Section, Iterator[_Stretch]]:
    return Section(len(buffer)), iter([([memoryview(buffer)], None)])


def _check_trailer(
    layout: BlobLayout, trailer: bytearray, digests: list[int], header_digest: int
) -> FirstTokens:
    """Read first tokens and flags; raise DigestMismatch unless every digest is right."""
    choices = layout.manifest.num_choices
    tokens, flags = trailer[: 8 * choices], trailer[8 * choices : 9 * choices]
    computed = [*digests, xxh3_64_intdigest(tokens), xxh3_64_intdigest(flags), header_digest]
    claimed = struct.unpack(f"<{layout.num_digests}Q", trailer[9 * choices :])
    if list(claimed) != computed:
        names = ["the header" if span.name == "digests" else span.name for span in layout.spans()]
        damaged = next(name for name, a, b in zip(names, claimed, computed, strict=True) if a != b)
        raise DigestMismatch(f"{damaged} was damaged on the way, or its digest was")
    token_ids = struct.unpack(f"<{choices}q", tokens)
    if not all(0 <= token < _MAX_TOKEN_ID for token in token_ids) or not set(flags) <= {0, 1}:
        raise ManifestMismatch("the first tokens are no token ids, or their flags no flags")
    return FirstTokens(token_ids, tuple(flag == 1 for flag in flags))

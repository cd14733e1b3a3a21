"""The blob, byte by byte, before any KV exists: it is a pure function of the manifest.

    u64 length | JSON, padded to 64 | per chunk, per layer: K, V | first_token | first_finished | digests

One valid safetensors file. K and V are [tokens, K, D]; `digests` holds xxh3_64 of every tensor before it, in
file order, and last of the header bytes (length and padding included).
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

from shared.errors import ManifestMismatch
from shared.kv.header import LENGTH, kv_tensors, write_header
from shared.kv.manifest import MAX_CHUNKS, QUANTISED_PARTS, Expected, Manifest
from shared.kv.shape import ITEMSIZE_BYTES, Kind, KvShape

_MIN_JSON_PADDED_BYTES = 64
_MOST_QUANTISED_BYTES = 5  # of a number: in a chunk of one token it has a scale and an offset of its own


class TensorSpan(NamedTuple):
    """One tensor of the file: bytes [begin, end) of the data section, as safetensors counts them."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return self.end - self.begin

    def entry(self) -> dict[str, object]:
        """Its entry in the header."""
        return {"dtype": self.dtype, "shape": list(self.shape), "data_offsets": [self.begin, self.end]}


class KvPart(NamedTuple):
    """One K or V tensor: the positions it covers, and where it begins in the data section."""

    chunk: int
    layer: int
    kind: Kind
    start: int
    end: int
    begin: int
    shape: KvShape

    @property
    def nbytes(self) -> int:
        """Length in bytes."""
        return (self.end - self.start) * self.shape.row_bytes

    @property
    def name(self) -> str:
        """As in the header."""
        return part_name(self.chunk, self.layer, self.kind)

    @property
    def span(self) -> TensorSpan:
        """The tensor as the header describes it."""
        shape = self.shape
        dims = (self.end - self.start, shape.num_kv_heads, shape.head_dim)
        return TensorSpan(self.name, shape.dtype, dims, self.begin, self.begin + self.nbytes)


def part_name(chunk: int, layer: int, kind: Kind) -> str:
    """The name of a K or V tensor."""
    return f"chunk.{chunk:04d}.layer.{layer:02d}.{kind}"


class BlobLayout:
    """Where everything lies. `trailer` is what comes after K and V.

    K and V travel as they are in the pool; shared.kv.quant_layout has the other layout.

    Made for every hand-off on both sides, so what only a person or a damaged blob needs is made when asked for.
    """

    spans_per_tensor = 1

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        shape = manifest.shape
        self.tensors = kv_tensors(shape.num_layers)
        self.row_bytes = shape.row_bytes
        self.kv_bytes = manifest.kv_bytes
        self.kv_wire_bytes = at = self.wire_bytes()
        choices = manifest.num_choices
        first_token = TensorSpan("first_token", "I64", (choices,), at, at + 8 * choices)
        first_finished = TensorSpan(
            "first_finished", "U8", (choices,), first_token.end, first_token.end + choices
        )
        self.num_digests = len(manifest.chunks) * len(self.tensors) * self.spans_per_tensor + 3
        digests_end = first_finished.end + 8 * self.num_digests
        digests = TensorSpan("digests", "U64", (self.num_digests,), first_finished.end, digests_end)
        self.trailer = (first_token, first_finished, digests)
        self.trailer_bytes = digests.end - at
        self.data_bytes = digests.end

    @cached_property
    def chunks(self) -> list[list[KvPart]]:
        """`chunks[i]` are the K and V tensors of chunk i."""
        chunks, at, shape = [], 0, self.manifest.shape
        for index, (start, end) in enumerate(self.manifest.chunks):
            nbytes = (end - start) * self.row_bytes
            chunks.append(
                [
                    KvPart(index, layer, kind, start, end, at + number * nbytes, shape)
                    for number, (layer, kind) in enumerate(self.tensors)
                ]
            )
            at += nbytes * len(self.tensors)
        return chunks

    @property
    def total_bytes(self) -> int:
        """Length of the whole file."""
        return len(self.header) + self.data_bytes

    def wire_bytes(self) -> int:
        """Bytes of K and V as they travel."""
        return self.kv_bytes

    def kv_spans(self) -> Iterator[TensorSpan]:
        """All but the trailer, in file order."""
        return (part.span for parts in self.chunks for part in parts)

    def spans(self) -> Iterator[TensorSpan]:
        """Every tensor in file order."""
        yield from self.kv_spans()
        yield from self.trailer

    def metadata(self) -> dict[str, str]:
        """The header's `__metadata__`."""
        return self.manifest.to_metadata()

    @cached_property
    def header(self) -> bytes:
        """Everything before the data section. A reader accepts any other JSON that says the same."""
        trailer = {span.name: span.entry() for span in self.trailer}
        return write_header(self.metadata(), self.manifest, trailer)

    def check_entries(self, entries: Mapping[str, object]) -> None:
        """Raise ManifestMismatch, naming the tensor, unless a header lists exactly these tensors."""
        left = dict(entries)
        for span in self.spans():
            if left.pop(span.name, None) != span.entry():
                raise ManifestMismatch(
                    f"tensor {span.name} is missing, or its dtype, shape or place is wrong"
                )
        if left:
            raise ManifestMismatch("the header lists a tensor that the manifest does not imply")


def total_bytes_bounds(expected: Expected, max_header_bytes: int) -> tuple[int, int]:
    """Least and greatest length that a blob for this reservation can have, whatever chunks it is cut into."""
    num_tokens, shape = expected.num_tokens - expected.from_token, expected.shape
    least_kv = most_kv = num_tokens * shape.bytes_per_token
    most_digests = MAX_CHUNKS * shape.num_tensors
    if expected.kv_wire is not None:
        numbers = least_kv // ITEMSIZE_BYTES[shape.dtype]
        least_kv = min(least_kv, numbers)
        most_kv = max(most_kv, numbers * _MOST_QUANTISED_BYTES)
        most_digests *= QUANTISED_PARTS
    others = 9 * expected.num_choices + LENGTH.size * 3 + _MIN_JSON_PADDED_BYTES
    return least_kv + others, most_kv + others + most_digests * 8 + max_header_bytes

"""The blob, byte by byte, before any KV exists: it is a pure function of the manifest.

    u64 length | JSON, padded to 64 | per chunk, per layer: K, V | first_token | first_finished | digests

One valid safetensors file. K and V are [tokens, K, D]; `digests` holds xxh3_64 of every tensor before it, in
file order, and last of the header bytes (length and padding included).
"""

from __future__ import annotations

import contextlib
import json
import struct
from collections.abc import Iterator, Mapping
from functools import cached_property
from typing import NamedTuple

import orjson

from shared.errors import InvalidRequest, ManifestMismatch
from shared.kv.manifest import MAX_CHUNKS, Expected, Manifest
from shared.kv.shape import KINDS, Kind, KvShape

LENGTH = struct.Struct("<Q")
METADATA = "__metadata__"
_ALIGNMENT_BYTES = 64
_MIN_JSON_BYTES = 2


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
        return f"chunk.{self.chunk:04d}.layer.{self.layer:02d}.{self.kind}"

    @property
    def span(self) -> TensorSpan:
        """The tensor as the header describes it."""
        shape = self.shape
        dims = (self.end - self.start, shape.num_kv_heads, shape.head_dim)
        return TensorSpan(self.name, shape.dtype, dims, self.begin, self.begin + self.nbytes)


class BlobLayout:
    """Where everything lies. `chunks[i]` are the K and V tensors of chunk i; `trailer` what comes after.

    Made for every hand-off on both sides, so what only a person or a damaged blob needs is made when asked for.
    """

    def __init__(self, manifest: Manifest) -> None:
        self.manifest = manifest
        self.chunks: list[list[KvPart]] = []
        shape = manifest.shape
        row_bytes, layers = shape.row_bytes, range(shape.num_layers)
        at = 0
        for index, (start, end) in enumerate(manifest.chunks):
            parts = []
            for layer in layers:
                for kind in KINDS:
                    parts.append(KvPart(index, layer, kind, start, end, at, shape))
                    at += (end - start) * row_bytes
            self.chunks.append(parts)
        self.row_bytes = shape.row_bytes
        self.kv_bytes = at
        choices = manifest.num_choices
        first_token = TensorSpan("first_token", "I64", (choices,), at, at + 8 * choices)
        first_finished = TensorSpan(
            "first_finished", "U8", (choices,), first_token.end, first_token.end + choices
        )
        self.num_digests = sum(len(parts) for parts in self.chunks) + 3
        digests_end = first_finished.end + 8 * self.num_digests
        digests = TensorSpan("digests", "U64", (self.num_digests,), first_finished.end, digests_end)
        self.trailer = (first_token, first_finished, digests)
        self.trailer_bytes = digests.end - at
        self.data_bytes = digests.end

    @property
    def total_bytes(self) -> int:
        """Length of the whole file."""
        return len(self.header) + self.data_bytes

    def spans(self) -> Iterator[TensorSpan]:
        """Every tensor in file order."""
        for parts in self.chunks:
            for part in parts:
                yield part.span
        yield from self.trailer

    def metadata(self) -> dict[str, str]:
        """The header's `__metadata__`."""
        return self.manifest.to_metadata()

    @cached_property
    def header(self) -> bytes:
        """Everything before the data section. A reader accepts any other JSON that says the same."""
        metadata = orjson.dumps(self.metadata()).decode()
        entries = [f'"{METADATA}":{metadata}']
        shape = self.manifest.shape
        # One entry costs a microsecond in this form, and several in any other.
        tensors = [f"{layer:02d}.{kind}" for layer in range(shape.num_layers) for kind in KINDS]
        for index, parts in enumerate(self.chunks):
            dims = f"[{parts[0].end - parts[0].start},{shape.num_kv_heads},{shape.head_dim}]"
            middle = f'":{{"dtype":"{shape.dtype}","shape":{dims},"data_offsets":['
            begin, nbytes = parts[0].begin, parts[0].nbytes
            for tensor in tensors:
                entries.append(f'"chunk.{index:04d}.layer.{tensor}{middle}{begin},{begin + nbytes}]}}')
                begin += nbytes
        entries += [f'"{span.name}":{orjson.dumps(span.entry()).decode()}' for span in self.trailer]
        content = f"{{{','.join(entries)}}}".encode()
        padding = -(LENGTH.size + len(content)) % _ALIGNMENT_BYTES
        return LENGTH.pack(len(content) + padding) + content + b" " * padding

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
    kv_bytes = (expected.num_tokens - expected.from_token) * expected.shape.bytes_per_token
    least = kv_bytes + 9 * expected.num_choices + LENGTH.size * 3 + _ALIGNMENT_BYTES
    most_digests = MAX_CHUNKS * expected.shape.num_layers * len(KINDS)
    return least, least + most_digests * 8 + max_header_bytes


def json_length(prefix: bytes | bytearray, max_header_bytes: int) -> int:
    """Length of the JSON part, from the file's first 8 bytes; bounded before anything of that size exists.

    Raises InvalidRequest.
    """
    (length,) = LENGTH.unpack(prefix)
    if not _MIN_JSON_BYTES <= length <= max_header_bytes - LENGTH.size:
        raise InvalidRequest(
            f"the header's length is not between {_MIN_JSON_BYTES} and {max_header_bytes} bytes"
        )
    return int(length)


def leading_metadata(header: bytes) -> dict[str, object]:
    """The manifest's fields, if the header begins with them as ours do; {} if it does not.

    For a reader that then compares the whole header with its own: nothing else of it is parsed.
    """
    begin = header.find(b"{", LENGTH.size + 1)
    if header[LENGTH.size : begin] == f'{{"{METADATA}":'.encode():
        with contextlib.suppress(orjson.JSONDecodeError):
            metadata = orjson.loads(header[begin : header.find(b"}", begin) + 1])
            return metadata if isinstance(metadata, dict) else {}
    return {}


def parse_header(content: bytes | bytearray) -> tuple[Manifest, dict[str, object]]:
    """Manifest and tensor entries of a header's JSON part. A name that occurs twice is refused.

    Raises InvalidRequest for what is no safetensors header, ManifestMismatch for what is not ours.
    """
    metadata, entries = header_fields(content)
    return Manifest.from_metadata(metadata), entries


def header_fields(content: bytes | bytearray) -> tuple[dict[str, object], dict[str, object]]:
    """Metadata and tensor entries of a header's JSON part, unread. Raises as `parse_header` does."""
    try:
        fields = json.loads(content.decode("utf-8"), object_pairs_hook=_unique)
    except (ValueError, RecursionError) as exc:
        raise InvalidRequest("the blob's header is not valid JSON") from exc
    if not isinstance(fields, dict):
        raise InvalidRequest("the blob's header is not a JSON object")
    metadata = fields.pop(METADATA, None)
    if not isinstance(metadata, dict):
        raise ManifestMismatch("the blob has no manifest")
    return metadata, fields


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ManifestMismatch("the header names something twice")
    return fields

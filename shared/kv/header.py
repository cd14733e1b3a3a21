"""The JSON header of a blob: read with suspicion, written in one form that a reader can compare by bytes."""

from __future__ import annotations

import json
import re
import struct
from collections.abc import Mapping
from functools import lru_cache
from itertools import chain, pairwise

import orjson

from shared.errors import InvalidRequest, ManifestMismatch
from shared.kv.manifest import Manifest
from shared.kv.shape import KINDS, Kind, KvShape

LENGTH = struct.Struct("<Q")
METADATA = "__metadata__"
_ALIGNMENT_BYTES = 64
_MIN_JSON_BYTES = 2
_OWN_QUANTISED = b'{"__metadata__":{"kv_wire":'
_OWN_CHUNKS = re.compile(rb'"chunks":"([0-9,-]*)"')


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


def claimed_chunks(header: bytes) -> str | None:
    """The chunk list, if the header has one where ours have it; nothing else is looked at.

    For a reader that then compares the whole header with the one that this chunk list implies.
    """
    match = _OWN_CHUNKS.search(header)
    return None if match is None else match[1].decode("ascii")


def claims_quantised(header: bytes) -> bool:
    """Whether the header seems to be of quantised KV; nothing else is looked at. For the same reader."""
    return header.startswith(_OWN_QUANTISED, LENGTH.size)


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


def write_header(
    metadata: Mapping[str, str], manifest: Manifest, trailer: Mapping[str, Mapping[str, object]]
) -> bytes:
    """Length and JSON, padded. trailer: the entries of the tensors that follow K and V."""
    shape = manifest.shape
    parts = [b'{"', METADATA.encode(), b'":', orjson.dumps(metadata)]
    at = 0
    for index, (start, end) in enumerate(manifest.chunks):
        parts += (b",", _kv_entries(shape, index, end - start, at))
        at += (end - start) * shape.bytes_per_token
    parts += (b",", orjson.dumps(trailer)[1:])
    return with_length(b"".join(parts))


def with_length(content: bytes) -> bytes:
    """A header's JSON as it stands at the beginning of the file, padded."""
    padding = -(LENGTH.size + len(content)) % _ALIGNMENT_BYTES
    return b"".join((LENGTH.pack(len(content) + padding), content, b" " * padding))


@lru_cache(maxsize=8)
def kv_tensors(num_layers: int) -> tuple[tuple[int, Kind], ...]:
    """Layer and kind of a chunk's tensors, in file order."""
    return tuple((layer, kind) for layer in range(num_layers) for kind in KINDS)


@lru_cache(maxsize=64)
def _kv_entries(shape: KvShape, index: int, num_rows: int, begin: int) -> bytes:
    """One chunk's entries. Most prompts begin with chunks of one size, so they are kept: some 10 KB each.

    Formatted all at once: one by one they would be half of a short prompt's hand-off.
    """
    nbytes = num_rows * shape.row_bytes
    num_tensors = len(kv_tensors(shape.num_layers))
    offsets = list(map(str, range(begin, begin + nbytes * num_tensors + 1, nbytes)))
    form = _entries_form(shape).replace("<chunk>", f"{index:04d}").replace("<rows>", str(num_rows))
    return (form % tuple(chain.from_iterable(pairwise(offsets)))).encode()


@lru_cache(maxsize=8)
def _entries_form(shape: KvShape) -> str:
    """What the entries of every chunk have in common. Kept, as a process has one model and so one shape."""
    dims = f"[<rows>,{shape.num_kv_heads},{shape.head_dim}]"
    tail = f'{{"dtype":"{shape.dtype}","shape":{dims},"data_offsets":[%s,%s]}}'
    return ",".join(
        f'"chunk.<chunk>.layer.{layer:02d}.{kind}":{tail}' for layer, kind in kv_tensors(shape.num_layers)
    )


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    fields = dict(pairs)
    if len(fields) != len(pairs):
        raise ManifestMismatch("the header names something twice")
    return fields

"""Blobs that are cut, flipped, padded or forged: each has its error, before KV is written where that can be."""

from __future__ import annotations

import json
import struct
from collections.abc import Callable, Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import DigestMismatch, HandoffError, InvalidRequest, ManifestMismatch
from shared.kv.decoder import BlobDecoder
from shared.kv.section import Section
from shared.kv.shape import KvShape
from tests.unit.shared.kv.blobs import MAX_HEADER_BYTES, Pool, decode, encode, expected, manifest_for

SHAPE = KvShape(1, 1, 2, "F16")
WANT = expected(num_tokens=5, shape=SHAPE, num_choices=2)
BLOB = encode(manifest_for(WANT), Pool(SHAPE, num_tokens=5, seed=1))
HEADER_BYTES = 8 + struct.unpack("<Q", BLOB[:8])[0]

Fields = dict[str, Any]


def sink() -> Pool:
    """An empty pool to receive into."""
    return Pool(SHAPE, num_tokens=5)


def rewritten(change: Callable[[Fields], object]) -> bytes:
    """The blob with another header."""
    fields = json.loads(BLOB[8:HEADER_BYTES])
    change(fields)
    return with_header(json.dumps(fields).encode())


def with_header(content: bytes) -> bytes:
    """The blob with these bytes for its JSON."""
    return struct.pack("<Q", len(content)) + content + BLOB[HEADER_BYTES:]


def assert_refused_unwritten(blob: bytes, error: type[Exception], match: str) -> None:
    """The blob raises, and no byte of the pool has changed."""
    pool = sink()
    before = pool.snapshot()
    with pytest.raises(error, match=match):
        decode(blob, WANT, pool)
    assert before == pool.snapshot()


def test_truncation_at_every_byte() -> None:
    """However short it was cut, the blob is refused; whether the carrier knew of it or not."""
    for length in range(len(BLOB)):
        with pytest.raises(InvalidRequest, match="ended too early"):
            decode(BLOB[:length], WANT, sink(), total=len(BLOB))
        with pytest.raises((InvalidRequest, ManifestMismatch)):
            decode(BLOB[:length], WANT, sink())


@settings(max_examples=400, deadline=None)
@given(st.integers(0, len(BLOB) * 8 - 1))
def test_bit_flip_anywhere(bit: int) -> None:
    """One flipped bit anywhere is refused; in the data it is always a digest that tells."""
    damaged = bytearray(BLOB)
    damaged[bit // 8] ^= 1 << bit % 8
    with pytest.raises(DigestMismatch if bit // 8 >= HEADER_BYTES else (HandoffError, InvalidRequest)):
        decode(bytes(damaged), WANT, sink())


def test_trailing_bytes_are_refused_before_kv() -> None:
    """A carrier length beyond the manifest's is a mismatch, known from the header on."""
    assert_refused_unwritten(BLOB + b"\0", ManifestMismatch, "length")


@pytest.mark.parametrize("length", [0, 1, MAX_HEADER_BYTES, 2**62, 2**64 - 1])
def test_absurd_header_length_is_refused_after_eight_bytes(length: int) -> None:
    """A header length out of bounds is refused before anything of that size is allocated."""
    taken = []

    def receive(buffers: Sequence[memoryview], section: Section) -> int:
        taken.append(sum(map(len, buffers)))
        buffers[0][:] = struct.pack("<Q", length)
        return 8

    decoder = BlobDecoder(WANT, sink().views(), total_bytes=2**63, max_header_bytes=MAX_HEADER_BYTES)
    with pytest.raises(InvalidRequest, match="length"):
        decoder.read(receive)
    assert [8] == taken


@pytest.mark.parametrize(
    "content", [b"{}x", b"\xff" * 9, b"{" * 50, b'{"a":' * 20_000, b"[1, 2]", b"nulll", b'"text"  ']
)
def test_bad_json_is_refused(content: bytes) -> None:
    """A header that is not a JSON object is an invalid request, however it is broken."""
    with pytest.raises(InvalidRequest):
        decode(with_header(content), WANT, Pool(SHAPE, num_tokens=5), max_header_bytes=2**20)


def test_other_whitespace_is_the_same_header() -> None:
    """A sender may write its JSON otherwise; but then its digest of the header must be of those bytes."""
    with pytest.raises(DigestMismatch, match="the header"):
        decode(rewritten(dict), WANT, sink())


FIRST = "chunk.0000.layer.00.k"


@pytest.mark.parametrize(
    "change",
    [
        lambda fields: fields.pop("__metadata__"),
        lambda fields: fields.update(__metadata__="text"),
        lambda fields: fields.pop(FIRST),
        lambda fields: fields.pop("digests"),
        lambda fields: fields.update(extra=fields[FIRST]),
        lambda fields: fields.update({FIRST: None}),
        lambda fields: fields[FIRST].update(dtype="BF16"),
        lambda fields: fields[FIRST].update(shape=[2, 1, 4]),
        lambda fields: fields[FIRST].update(data_offsets=[0, 15]),
        lambda fields: fields[FIRST].update(data_offsets=[16, 32]),
        lambda fields: fields["__metadata__"].update(epoch="8"),
        lambda fields: fields["__metadata__"].update(fingerprint="e" * 32),
        lambda fields: fields["__metadata__"].update(token_hash="0" * 32),
        lambda fields: fields["__metadata__"].update(handoff_id="h2"),
        lambda fields: fields["__metadata__"].update(num_choices="1"),
        lambda fields: fields["__metadata__"].update(dtype="BF16"),
        lambda fields: fields["__metadata__"].update(chunks="0-5"),
        lambda fields: fields["__metadata__"].update(from_token="4", chunks="4-5"),
    ],
)
def test_foreign_manifest_writes_nothing(change: Callable[[Fields], object]) -> None:
    """Another model, prompt, reservation, shape, dtype, or tensor list is refused before the first write."""
    assert_refused_unwritten(rewritten(change), ManifestMismatch, ".")


def test_duplicate_names_are_refused() -> None:
    """A name that occurs twice in the header is refused, even with equal values."""
    content = BLOB[8:HEADER_BYTES].rstrip()
    entry = json.loads(content)[FIRST]
    twice = content[:-1] + f',"{FIRST}":{json.dumps(entry)}}}'.encode()
    assert_refused_unwritten(with_header(twice), ManifestMismatch, "twice")


def test_first_tokens_must_be_tokens() -> None:
    """A negative first token is refused even when its digest is right."""
    pool = Pool(SHAPE, num_tokens=5, seed=1)
    blob = encode(manifest_for(WANT), pool, first_token=-1)
    with pytest.raises(ManifestMismatch, match="first tokens"):
        decode(blob, WANT, sink())

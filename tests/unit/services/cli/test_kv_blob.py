"""Blobs in files: what the project's own encoder wrote is sound, and whatever is wrong with a file is found."""

from __future__ import annotations

import json
import os
import struct
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from services.cli.kv_blob import BlobCheck, NoBlob, check_blob
from shared.errors import ServingError
from shared.kv.shape import KvDtype, KvShape
from tests.unit.shared.kv.blobs import Pool, decode, encode, expected, first_tokens, manifest_for

SHAPE = KvShape(2, 1, 2, "BF16")
WANT = expected(num_tokens=5, shape=SHAPE, num_choices=2)
BLOB = encode(manifest_for(WANT), Pool(SHAPE, num_tokens=5, seed=1))
HEADER_BYTES = 8 + struct.unpack("<Q", BLOB[:8])[0]
FIRST_OFFSET = len(BLOB) - 8 * 11 - 2 - 16

Fields = dict[str, Any]


def checked(folder: Path, blob: bytes | bytearray) -> BlobCheck:
    """The check of a file with these bytes."""
    path = folder / "blob"
    path.unlink(missing_ok=True)  # ten times faster than writing it over
    path.write_bytes(blob)
    return check_blob(path)


def found(folder: Path, blob: bytes | bytearray) -> bool:
    """Whether anything at all is wrong."""
    try:
        return not checked(folder, blob).sound
    except NoBlob:
        return True


def with_fields(change: Callable[[Fields], object]) -> bytes:
    """The blob with another header."""
    fields = json.loads(BLOB[8:HEADER_BYTES])
    change(fields)
    content = json.dumps(fields).encode()
    return struct.pack("<Q", len(content)) + content + BLOB[HEADER_BYTES:]


def forged(offset: int, content: bytes) -> bytes:
    """The blob with these bytes in its first tokens or flags, and the right digests for them."""
    blob = bytearray(BLOB)
    blob[offset : offset + len(content)] = content
    flags = FIRST_OFFSET + 16
    digests = (xxh3_64_intdigest(blob[FIRST_OFFSET:flags]), xxh3_64_intdigest(blob[flags : flags + 2]))
    blob[-24:-8] = struct.pack("<2Q", *digests)
    return bytes(blob)


@pytest.mark.parametrize("dtype", ["F32", "BF16", "F16"])
@pytest.mark.parametrize("from_token", [0, 3, 10])
def test_what_the_encoder_writes_is_sound(tmp_path: Path, dtype: KvDtype, from_token: int) -> None:
    """Whole prompts, suffixes and hand-offs without KV, in every dtype."""
    shape = KvShape(3, 2, 4, dtype)
    want = expected(num_tokens=10, from_token=from_token, shape=shape, num_choices=3)
    blob = encode(manifest_for(want), Pool(shape, num_tokens=10, seed=2))
    check = checked(tmp_path, blob)
    assert () == check.problems
    assert check.sound
    assert manifest_for(want) == check.layout.manifest
    assert len(blob) == check.file_bytes == check.header_bytes + check.layout.data_bytes
    assert {"ok"} == {check.header} | {tensor.verdict for tensor in check.tensors()}
    assert [span.name for span in check.layout.spans()] == [t.span.name for t in check.tensors()]
    assert first_tokens(3) == check.first


def test_tensors_are_digested_one_by_one(tmp_path: Path) -> None:
    """A digest is that of the tensor's own bytes, also where the read buffer ends within it."""
    shape = KvShape(1, 2, 64, "F32")
    want = expected(num_tokens=3000, shape=shape)
    blob = encode(manifest_for(want, chunk_size=0), Pool(shape, num_tokens=3000, seed=3))
    check = checked(tmp_path, blob)
    assert check.sound
    for tensor in check.tensors():
        begin = check.header_bytes + tensor.span.begin
        assert xxh3_64_intdigest(blob[begin : begin + tensor.span.nbytes]) == tensor.digest


def test_a_flipped_bit_in_any_byte_is_found(tmp_path: Path) -> None:
    """Wherever it is: length, JSON, padding, KV, first tokens, flags, digests."""
    for index in range(len(BLOB)):
        blob = bytearray(BLOB)
        blob[index] ^= 1 << index % 8
        assert found(tmp_path, blob), index


def test_every_truncation_is_found(tmp_path: Path) -> None:
    """However little of it is gone."""
    for length in range(len(BLOB)):
        assert found(tmp_path, BLOB[:length]), length


@pytest.mark.parametrize("extra", [b"\0", b"\n", BLOB])
def test_trailing_bytes_are_found(tmp_path: Path, extra: bytes) -> None:
    """And counted."""
    assert (f"{len(extra):,} bytes follow the blob's end",) == checked(tmp_path, BLOB + extra).problems


def test_a_damaged_tensor_is_named_and_the_others_are_right(tmp_path: Path) -> None:
    """One flipped bit spoils one verdict, and the digests cannot be called right any more."""
    blob = bytearray(BLOB)
    blob[HEADER_BYTES + 20] ^= 1
    check = checked(tmp_path, blob)
    assert ("chunk.0000.layer.00.v is damaged, or its digest is",) == check.problems
    assert ["ok", "damaged", "ok", "ok"] == [tensor.verdict for tensor in check.chunks[0]]
    assert ["ok", "ok", "unchecked"] == [tensor.verdict for tensor in check.trailer]
    assert first_tokens(2) == check.first


def test_a_damaged_manifest_that_still_reads_is_found(tmp_path: Path) -> None:
    """Its digest tells: another epoch is another hand-off."""
    check = checked(tmp_path, BLOB.replace(b'"epoch":"7"', b'"epoch":"6"'))
    assert ("the header is damaged, or its digest is",) == check.problems
    assert 6 == check.layout.manifest.epoch


def test_what_a_cut_file_still_holds_is_told(tmp_path: Path) -> None:
    """Whole tensors cannot be checked without their digests; the others are missing."""
    check = checked(tmp_path, BLOB[: HEADER_BYTES + 40])
    assert (f"the file ends {len(BLOB) - HEADER_BYTES - 40:,} bytes too early",) == check.problems
    verdicts = [tensor.verdict for tensor in check.tensors()]
    assert ["unchecked"] * 2 + ["missing"] * 9 == verdicts
    assert ("unchecked", None) == (check.header, check.first)


def test_forged_first_tokens_are_found(tmp_path: Path) -> None:
    """A right digest does not make a token id of a negative number, nor a flag of a 2."""
    assert checked(tmp_path, forged(FIRST_OFFSET, struct.pack("<q", 5))).sound
    tokens = checked(tmp_path, forged(FIRST_OFFSET, struct.pack("<q", -5)))
    assert ("the first tokens are no token ids",) == tokens.problems
    flags = checked(tmp_path, forged(FIRST_OFFSET + 16, b"\2"))
    assert ("the flags of the first tokens are neither 0 nor 1",) == flags.problems


@settings(max_examples=300, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_the_check_and_a_decode_worker_agree(tmp_path: Path, data: st.DataObject) -> None:
    """Whatever was done to its bytes, a blob is sound if and only if the decoder takes it."""
    at = data.draw(st.integers(0, len(BLOB)))
    cut = data.draw(st.integers(0, 12))
    blob = BLOB[:at] + data.draw(st.binary(max_size=12)) + BLOB[at + cut :]
    pool = Pool(SHAPE, num_tokens=5)
    try:
        decode(blob, WANT, pool)
        accepted = True
    except ServingError:
        accepted = False
    assert accepted == (not found(tmp_path, blob))


@pytest.mark.parametrize(
    ("blob", "message"),
    [
        (b"", "too short for a header"),
        (b"\x10\0\0", "too short for a header"),
        (b"# A text file, not a blob\n", "the header's length is not between"),
        (struct.pack("<Q", 2**63), "the header's length is not between"),
        (struct.pack("<Q", 8 * 1024 * 1024) + b"{}", "the header's length is not between"),
        (struct.pack("<Q", 4096) + b"{}", "the file ends within its header"),
        (struct.pack("<Q", 7) + b"not {} ", "not valid JSON"),
        (struct.pack("<Q", 100_000) + b"[" * 100_000, "not valid JSON"),
        (struct.pack("<Q", 2) + b"[]", "not a JSON object"),
        (struct.pack("<Q", 2) + b"{}", "the blob has no manifest"),
        (with_fields(lambda f: f.pop("digests")), "lists 10 tensors, its manifest implies 11"),
        (with_fields(lambda f: f["__metadata__"].update(protocol="3")), "protocol is not 2"),
        (with_fields(lambda f: f["first_token"].update(dtype="F32")), "tensor first_token is missing"),
        (with_fields(lambda f: f["__metadata__"].update(num_layers="9" * 15)), "its manifest implies"),
    ],
)
def test_what_is_no_blob_is_refused(tmp_path: Path, blob: bytes, message: str) -> None:
    """With one line that says why, before anything of a claimed size exists."""
    with pytest.raises(NoBlob, match=message) as caught:
        checked(tmp_path, blob)
    assert "\n" not in str(caught.value)


def test_what_is_no_file_is_refused(tmp_path: Path) -> None:
    """Nothing waits for the writer of a FIFO."""
    with pytest.raises(NoBlob, match="No such file"):
        check_blob(tmp_path / "absent")
    with pytest.raises(NoBlob, match="not a regular file"):
        check_blob(tmp_path)
    os.mkfifo(tmp_path / "fifo")
    with pytest.raises(NoBlob, match="not a regular file"):
        check_blob(tmp_path / "fifo")


def test_memory_does_not_grow_with_the_blob(tmp_path: Path) -> None:
    """24 MiB of KV are read within 3 MiB."""
    shape = KvShape(2, 4, 128, "F32")
    want = expected(num_tokens=3072, shape=shape)
    path = tmp_path / "blob"
    path.write_bytes(encode(manifest_for(want, chunk_size=1024), Pool(shape, num_tokens=3072, block_size=16)))
    tracemalloc.start()
    try:
        assert check_blob(path).sound
        _, peak_bytes = tracemalloc.get_traced_memory()
    finally:
        tracemalloc.stop()
    assert peak_bytes < 3 * 1024 * 1024 < 24 * 1024 * 1024 < path.stat().st_size

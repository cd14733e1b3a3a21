"""The manifest: what it says survives the trip, and what it may not say is refused."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ManifestMismatch
from shared.kv.manifest import MAX_CHUNKS, MAX_PLANNED_TENSORS, Manifest, check, plan_chunks, token_hash
from shared.kv.shape import KvShape
from tests.unit.shared.kv.blobs import SHAPE, expected, manifest_for

GOOD = manifest_for(expected())


@given(st.integers(0, 5000), st.integers(0, 5000), st.integers(0, 300))
def test_planned_chunks_tile(start: int, length: int, chunk_size: int) -> None:
    """Planned chunks tile the range in order, are bounded in number, and never empty."""
    chunks = plan_chunks(start, start + length, chunk_size, SHAPE)
    assert [start, *(end for _, end in chunks)] == [*(first for first, _ in chunks), start + length]
    assert all(first < end for first, end in chunks)
    assert len(chunks) <= MAX_CHUNKS


def test_chunk_size_is_kept() -> None:
    """Chunks have the size asked for, but the last; 0 means one chunk."""
    assert plan_chunks(3, 12, 4, SHAPE) == ((3, 7), (7, 11), (11, 12))
    assert plan_chunks(3, 12, 0, SHAPE) == ((3, 12),)
    assert plan_chunks(12, 12, 4, SHAPE) == ()


@pytest.mark.parametrize(
    ("num_layers", "chunk_size", "planned"), [(1, 256, 256), (28, 256, 768), (80, 128, 2048)]
)
def test_a_long_prompt_has_longer_chunks(num_layers: int, chunk_size: int, planned: int) -> None:
    """Multiples of what is computed at once, so that no header grows with the prompt."""
    shape = KvShape(num_layers, 1, 4, "BF16")
    chunks = plan_chunks(0, 100_000, chunk_size, shape)
    assert (0, planned) == chunks[0]
    assert len(chunks) * 2 * num_layers <= MAX_PLANNED_TENSORS


def test_metadata_round_trip() -> None:
    """A manifest read from its own metadata is the same manifest."""
    assert Manifest.from_metadata(GOOD.to_metadata()) == GOOD


def test_empty_chunk_list_round_trip() -> None:
    """A manifest with nothing missing at decode has no chunks."""
    nothing = manifest_for(expected(from_token=10))
    assert nothing.chunks == ()
    assert nothing.kv_bytes == 0
    assert Manifest.from_metadata(nothing.to_metadata()) == nothing


@pytest.mark.parametrize("name", sorted(GOOD.to_metadata()))
def test_every_field_is_needed(name: str) -> None:
    """A manifest that lacks any one field is refused."""
    metadata = GOOD.to_metadata()
    del metadata[name]
    with pytest.raises(ManifestMismatch):
        Manifest.from_metadata(metadata)


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("protocol", "3"),
        ("epoch", "-1"),
        ("epoch", "1_0"),
        ("epoch", " 1"),
        ("epoch", "0x1"),
        ("epoch", "9" * 40),
        ("epoch", 7),
        ("num_choices", "0"),
        ("num_choices", "129"),
        ("num_tokens", "0"),
        ("head_dim", "3"),
        ("num_layers", "0"),
        ("dtype", "F64"),
        ("handoff_id", "../x"),
        ("handoff_id", ""),
        ("chunks", "0-4,4-8"),
        ("chunks", "0-4,8-10,4-8"),
        ("chunks", "0-4,4-4,4-10"),
        ("chunks", "0-4,3-10"),
        ("chunks", "1-10"),
        ("chunks", "0-11"),
        ("chunks", "0-"),
        ("chunks", "0-4,"),
        ("chunks", ",".join(f"{i}-{i + 1}" for i in range(MAX_CHUNKS + 1))),
        ("surprise", "1"),
    ],
)
def test_malformed_metadata_is_refused(name: str, value: object) -> None:
    """Values that are not exactly what this protocol writes are a mismatch."""
    with pytest.raises(ManifestMismatch):
        Manifest.from_metadata({**GOOD.to_metadata(), name: value})


def test_check_names_every_difference() -> None:
    """The refusal names the fields that differ, and no others; the chunk list is the sender's choice."""
    received = dataclasses.replace(GOOD, epoch=8, shape=dataclasses.replace(SHAPE, dtype="F16"))
    with pytest.raises(ManifestMismatch, match=r": epoch, shape$"):
        check(received, expected())
    check(manifest_for(expected(), chunk_size=3), expected())


def test_token_hash_depends_on_order_and_length() -> None:
    """Different ids, another order or another length give another hash."""
    hashes = {token_hash(ids) for ids in ([1, 2, 3], [3, 2, 1], [1, 2], [1, 2, 3, 0], [])}
    assert len(hashes) == 5


def test_bytes_per_token_of_known_models() -> None:
    """The formula gives the known sizes of Qwen2.5 0.5B and 7B in bfloat16."""
    assert KvShape(24, 2, 64, "BF16").bytes_per_token == 12_288
    assert KvShape(28, 4, 128, "BF16").bytes_per_token == 57_344


def test_impossible_shape_is_refused() -> None:
    """A shape that no model has cannot be made."""
    with pytest.raises(ValueError, match="even"):
        KvShape(1, 1, 3, "F32")
    with pytest.raises(ValueError, match="positive"):
        KvShape(0, 1, 4, "F32")

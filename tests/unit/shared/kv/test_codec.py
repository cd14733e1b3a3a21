"""Encoder and decoder: bit for bit, one valid safetensors file, pieces of bounded size."""

from __future__ import annotations

from pathlib import Path

import pytest
import safetensors
import safetensors.torch
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import InvariantBroken
from shared.kv.batch import BATCH_BYTES, BATCH_TENSORS
from shared.kv.block_views import block_runs
from shared.kv.encoder import BlobEncoder
from shared.kv.layout import BlobLayout, total_bytes_bounds
from shared.kv.shape import ITEMSIZE_BYTES, KvDtype, KvShape
from tests.unit.shared.kv.blobs import SHAPE, Pool, decode, encode, expected, first_tokens, manifest_for

TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_round_trip(data: st.DataObject) -> None:
    """KV arrives bit for bit whatever dtype, block sizes, chunks and suffix; all other memory stays as it was."""
    dtype = data.draw(st.sampled_from(list(ITEMSIZE_BYTES)))
    shape = KvShape(data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), 4, dtype)
    num_tokens = data.draw(st.integers(1, 70))
    from_token = data.draw(st.integers(0, num_tokens))
    num_choices = data.draw(st.integers(1, 5))
    want = expected(num_tokens=num_tokens, from_token=from_token, shape=shape, num_choices=num_choices)
    block_sizes = st.sampled_from([1, 3, 16, 256])
    source = Pool(shape, num_tokens=num_tokens, block_size=data.draw(block_sizes), seed=1)
    sink = Pool(shape, num_tokens=num_tokens, block_size=data.draw(block_sizes), seed=2)
    before = sink.snapshot()

    blob = encode(manifest_for(want, chunk_size=data.draw(st.integers(0, 20))), source)
    steps = st.integers(1, 400)
    received = decode(blob, want, sink, step=lambda room: min(room, data.draw(steps)))

    assert first_tokens(num_choices) == received.first
    assert (num_tokens - from_token) * shape.bytes_per_token == received.kv_bytes
    assert len(blob) == received.wire_bytes
    assert source.content(from_token) == sink.content(from_token)
    sink.erase(from_token)
    assert sink.erased(before, from_token) == sink.snapshot()


@pytest.mark.parametrize("dtype", list(ITEMSIZE_BYTES))
@pytest.mark.parametrize("from_token", [0, 6, 10])
def test_blob_is_a_safetensors_file(tmp_path: Path, dtype: KvDtype, from_token: int) -> None:
    """Any safetensors reader finds manifest, names, shapes, dtypes and values, also when there is no KV to send."""
    shape = KvShape(2, 2, 4, dtype)
    pool = Pool(shape, num_tokens=10, seed=3)
    manifest = manifest_for(expected(from_token=from_token, shape=shape, num_choices=3))
    layout = BlobLayout(manifest)
    blob = encode(manifest, pool)
    path = tmp_path / "blob.safetensors"
    path.write_bytes(blob)

    loaded = safetensors.torch.load(blob)
    with safetensors.safe_open(path, "pt") as opened:
        assert manifest.to_metadata() == opened.metadata()
        assert {span.name for span in layout.spans()} == set(opened.keys()) == set(loaded)
    for index, (start, end) in enumerate(manifest.chunks):
        tensor = loaded[f"chunk.{index:04d}.layer.01.v"]
        assert ((end - start, 2, 4), TORCH_DTYPES[dtype]) == (tuple(tensor.shape), tensor.dtype)
        in_pool = b"".join(pool.views().views(1, "v", start, end))
        assert in_pool == tensor.contiguous().view(torch.uint8).numpy().tobytes()
    assert [100, 101, 102] == loaded["first_token"].tolist()
    assert [0, 1, 0] == loaded["first_finished"].tolist()
    assert (layout.total_bytes, 0) == (len(blob), len(layout.header) % 64)


@pytest.mark.parametrize("chunk_size", [0, 1, 4])
def test_length_bounds_hold(chunk_size: int) -> None:
    """Every way to cut a prompt into chunks gives a length within the bounds known beforehand."""
    want = expected()
    least, most = total_bytes_bounds(want, 64 * 1024)
    assert least <= BlobLayout(manifest_for(want, chunk_size=chunk_size)).total_bytes <= most


@pytest.mark.parametrize("block_size", [1, 4, 1024])
def test_batches_are_bounded(block_size: int) -> None:
    """No batch is too large for a core's cache or has too many buffers; large blocks are sent as they lie."""
    shape = KvShape(2, 8, 64, "F32")
    pool = Pool(shape, num_tokens=700, block_size=block_size, seed=4)
    manifest = manifest_for(expected(num_tokens=700, shape=shape), chunk_size=0)
    encoder = BlobEncoder(BlobLayout(manifest), pool.views())
    owners = set()
    for batch in encoder.chunk(0):
        assert len(batch) <= BATCH_TENSORS
        assert sum(map(len, batch)) <= BATCH_BYTES
        owners |= {id(view.obj) for view in batch if isinstance(view, memoryview)}
    if block_size == 1024:
        assert {id(buffer.obj) for buffer in pool.buffers.values()} == owners
    else:
        assert len(owners) == 1


def test_tiny_tensors_share_batches() -> None:
    """A suffix of one token is one batch, not one for each of its tensors; very many tensors are several."""
    for num_layers, num_batches in ((100, 1), (300, 3)):
        shape = KvShape(num_layers, 1, 4, "F16")
        pool = Pool(shape, num_tokens=1, seed=4)
        encoder = BlobEncoder(BlobLayout(manifest_for(expected(num_tokens=1, shape=shape))), pool.views())
        assert num_batches == len(list(encoder.chunk(0)))


def test_encoder_keeps_order() -> None:
    """A chunk out of turn, a trailer too early or for another number of choices is a bug, and is told as one."""
    pool = Pool(SHAPE, num_tokens=10, seed=5)
    encoder = BlobEncoder(BlobLayout(manifest_for(expected())), pool.views())
    with pytest.raises(InvariantBroken, match="chunk 0 was next"):
        next(encoder.chunk(1))
    with pytest.raises(InvariantBroken, match="before all chunks"):
        encoder.trailer()
    for index in range(3):
        list(encoder.chunk(index))
    with pytest.raises(InvariantBroken, match="2 first tokens"):
        encoder.trailer().of(first_tokens(2))


def test_chunk_filled_is_called_in_order() -> None:
    """The sink hears of a chunk when all its bytes are there, and is not asked beyond it before."""
    want = expected()
    pool = Pool(SHAPE, num_tokens=10)
    calls: list[tuple[str, int, int]] = []
    decode(encode(manifest_for(want), Pool(SHAPE, num_tokens=10, seed=6)), want, pool, log=calls)
    filled = [call[1:] for call in calls if call[0] == "filled"]
    assert [(0, 4), (4, 8), (8, 10)] == filled
    expected_calls = []
    for chunk in filled:
        expected_calls += [("views", *chunk)] * 4 + [("filled", *chunk)]
    assert expected_calls == calls


def test_block_runs_join_neighbours() -> None:
    """Neighbouring blocks become one run; a range may begin and end within blocks."""
    assert [(22, 24), (8, 16), (4, 7)] == block_runs([5, 2, 3, 1], 4, 2, 15)
    assert [] == block_runs([5], 4, 2, 2)
    with pytest.raises(InvariantBroken):
        block_runs([5], 4, 2, 5)

"""The pool's tensors: writing, reading, copying and viewing positions."""

from __future__ import annotations

import mmap
import os

import pytest
import torch

from shared.engine.kv_cache import BlockRun, CacheShape, KVCache

CPU = torch.device("cpu")
SHAPE = CacheShape(num_layers=2, num_blocks=6, block_size=4, num_kv_heads=2, head_dim=3, dtype=torch.float32)


def _filled() -> KVCache:
    """Every element is different."""
    cache = KVCache(SHAPE, CPU)
    for number, tensor in enumerate((*cache.k, *cache.v)):
        tensor.copy_(torch.arange(tensor.numel()).view_as(tensor) + 1000 * number)
    return cache


def test_the_bytes_of_a_block_are_the_formula() -> None:
    """2 * L * K * D * itemsize for each position."""
    assert 2 * 2 * 2 * 3 * 4 * 4 == SHAPE.block_bytes
    assert 24 == SHAPE.row_bytes
    assert 9 == SHAPE.with_blocks(9).num_blocks


@pytest.mark.parametrize("table", [[2], [1, 2, 3], [4, 0, 5], [3, 2]])
def test_what_is_written_is_read_in_order(table: list[int]) -> None:
    """Adjacent or not, a table is read position by position, no further than asked."""
    cache = _filled()
    num_tokens = len(table) * 4 - 1
    slots = torch.tensor([table[p // 4] * 4 + p % 4 for p in range(num_tokens)])
    k, v = torch.randn(2, num_tokens, 2, 3)
    cache.write(1, slots, k, v)
    read_k, read_v = cache.read(1, BlockRun(table, CPU), num_tokens)
    assert torch.equal(k, read_k)
    assert torch.equal(v, read_v)


def test_writing_touches_nothing_else() -> None:
    """Other positions, layers and the other kind stay as they were."""
    cache, before = _filled(), _filled()
    cache.write(0, torch.tensor([5]), torch.zeros(1, 2, 3), torch.zeros(1, 2, 3))
    assert torch.equal(before.k[1], cache.k[1])
    changed = (before.k[0] != cache.k[0]).flatten(2).any(2)
    assert [[1, 1]] == changed.nonzero().tolist()


@pytest.mark.parametrize(
    ("ids", "adjacent"), [([3], True), ([1, 2, 3], True), ([1, 3], False), ([2, 1], False)]
)
def test_adjacent_blocks_are_read_without_a_copy(ids: list[int], adjacent: bool) -> None:
    """A run of ids that count up is a view of the pool."""
    cache = _filled()
    run = BlockRun(ids, CPU)
    k, _ = cache.read(0, run, 4)
    assert (
        adjacent
        == run.adjacent
        == (k.untyped_storage().data_ptr() == cache.k[0].untyped_storage().data_ptr())
    )


def test_blocks_are_copied_in_every_layer() -> None:
    """All pairs are read before any is written, and nothing else changes."""
    cache, before = _filled(), _filled()
    cache.copy_blocks([(0, 3), (0, 4), (1, 0)])
    cache.copy_blocks([])
    for tensor, old in zip((*cache.k, *cache.v), (*before.k, *before.v), strict=True):
        assert torch.equal(old[[1, 1, 2, 0, 0, 5]], tensor)


@pytest.mark.parametrize("shareable", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_host_bytes_are_the_pool_itself(dtype: torch.dtype, *, shareable: bool) -> None:
    """What the receiver writes into a region is what attention reads, and a peer if it was let."""
    cache = KVCache(CacheShape(2, 2, 4, 2, 3, dtype), CPU, shareable=shareable)
    memory = cache.memory
    tensors = [tensor for pair in zip(cache.k, cache.v, strict=True) for tensor in pair]
    for region, tensor in zip(memory.regions, tensors, strict=True):
        content = torch.randn(2, 4, 2, 3).to(dtype)
        region[:] = content.view(torch.uint8).numpy().tobytes()
        assert torch.equal(content, tensor)
    assert (2, 4, shareable) == (memory.num_blocks, memory.block_size, memory.shared is not None)
    if memory.shared is not None:
        assert b"".join(memory.regions) == mmap.mmap(memory.shared.descriptor, 0, prot=mmap.PROT_READ)[:]


def test_a_host_without_memfd_has_a_pool_all_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    """It cannot be shared, and says so."""
    monkeypatch.delattr(os, "memfd_create")
    assert KVCache(SHAPE, CPU, shareable=True).memory.shared is None


def test_a_cache_elsewhere_has_no_host_bytes() -> None:
    """Views of device memory would need staging."""
    with pytest.raises(ValueError, match="host memory"):
        _ = KVCache(SHAPE, torch.device("meta")).memory

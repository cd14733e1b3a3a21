"""The pool's tensors: writing, reading, copying and viewing positions."""

from __future__ import annotations

import pytest
import torch

from shared.engine.kv_cache import BlockRun, CacheShape, KVCache, host_bytes
from shared.kv.shape import Kind

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


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_host_bytes_are_the_pool_itself(dtype: torch.dtype) -> None:
    """What the receiver writes into the view is what attention reads."""
    cache = KVCache(CacheShape(1, 2, 4, 2, 3, dtype), CPU)
    view = host_bytes(cache)
    kinds: tuple[Kind, Kind] = ("k", "v")
    for kind, tensor in zip(kinds, (cache.k[0], cache.v[0]), strict=True):
        content = torch.randn(2, 4, 2, 3).to(dtype)
        view(0, kind)[:] = content.view(torch.uint8).numpy().tobytes()
        assert torch.equal(content, tensor)


def test_a_cache_elsewhere_has_no_host_bytes() -> None:
    """Views of device memory would need staging."""
    with pytest.raises(ValueError, match="host memory"):
        host_bytes(KVCache(SHAPE, torch.device("meta")))

"""KV staged through host memory is the KV of the pool, in both directions."""

from __future__ import annotations

import pytest
import torch

from shared.engine.kv_cache import CacheShape, KVCache
from shared.engine.staged_views import StagedSink, StagedSource
from shared.kv.block_views import BlockViews
from shared.kv.shape import KINDS

BLOCKS = (5, 2, 3, 0)


def random_cache(dtype: torch.dtype) -> KVCache:
    """A cache full of noise."""
    cache = KVCache(CacheShape(3, 8, 4, 2, 6, dtype), torch.device("cpu"))
    for tensor in (*cache.k, *cache.v):
        tensor.copy_(torch.randn(tensor.shape))
    return cache


def read(source: StagedSource | BlockViews, start: int, end: int) -> list[bytes]:
    """All bytes of a range, layer by layer."""
    return [b"".join(source.views(layer, kind, start, end)) for layer in range(3) for kind in KINDS]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(("start", "end"), [(0, 16), (3, 9), (7, 8), (4, 4)])
def test_staged_bytes_equal_the_views_of_the_pool(dtype: torch.dtype, start: int, end: int) -> None:
    """For whole tables, parts of blocks, and nothing at all."""
    cache = random_cache(dtype)
    in_place = BlockViews(cache.memory, BLOCKS, cache.shape.row_bytes)

    assert read(in_place, start, end) == read(StagedSource(cache, BLOCKS), start, end)


def test_a_filled_chunk_lands_in_its_blocks_and_nowhere_else() -> None:
    """What the sink writes is what the source reads; all other slots keep their content."""
    source, target = random_cache(torch.float32), random_cache(torch.float32)
    before = [tensor.clone() for tensor in (*target.k, *target.v)]
    sink, wanted = StagedSink(target, BLOCKS), StagedSource(source, BLOCKS)
    for start, end in ((2, 7), (7, 13)):
        for layer in range(3):
            for kind in KINDS:
                (view,) = sink.views(layer, kind, start, end)
                view[:] = b"".join(wanted.views(layer, kind, start, end))
        sink.chunk_filled(start, end)

    assert read(wanted, 2, 13) == read(StagedSource(target, BLOCKS), 2, 13)
    written = [BLOCKS[p // 4] * 4 + p % 4 for p in range(2, 13)]
    for old, new in zip(before, (*target.k, *target.v), strict=True):
        kept = [slot for slot in range(32) if slot not in written]
        assert torch.equal(old.flatten(0, 1)[kept], new.flatten(0, 1)[kept])

"""How a hand-off reads and writes the cache: in place in host memory, or staged from and to a device."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from shared.engine.kv_cache import KVCache
from shared.engine.staged_views import StagedSink, StagedSource
from shared.kv.block_views import BlockViews
from shared.kv.pool_memory import PoolMemory
from shared.kv.shape import KV_DTYPES, KvShape
from shared.kv.source import KvSink, KvSource


@dataclass(frozen=True)
class KvAccess:
    """source, sink: of the sequence with this block table. memory: where the pool lies, if that is host memory."""

    shape: KvShape
    source: Callable[[Sequence[int]], KvSource]
    sink: Callable[[Sequence[int]], KvSink]
    memory: PoolMemory | None = None


def kv_access(cache: KVCache) -> KvAccess:
    """The way to this cache's KV."""
    shape = cache.shape
    dtype = KV_DTYPES[str(shape.dtype).removeprefix("torch.")]
    kv_shape = KvShape(shape.num_layers, shape.num_kv_heads, shape.head_dim, dtype)
    if cache.device.type != "cpu":
        return KvAccess(kv_shape, partial(StagedSource, cache), partial(StagedSink, cache))
    memory = cache.memory

    def in_place(blocks: Sequence[int]) -> BlockViews:
        return BlockViews(memory, blocks, shape.row_bytes)

    return KvAccess(kv_shape, in_place, in_place, memory)

"""The KV cache: one K and one V tensor per layer, and byte views of token ranges for the hand-off.

Layout of each: [num_blocks, block_size, num_kv_heads, head_dim]. So a block of a layer is contiguous, and on
the CPU a range of positions is a list of memory views of the pool: sending and receiving copy nothing first.
Other devices need staged views (`shared.kv.source` is the interface to implement).
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

import structlog
import torch
from torch import Tensor

from shared.kv.host_memory import own_memory
from shared.kv.pool_memory import PoolMemory
from shared.kv.shape import KINDS
from shared.kv.shared_memory import SharedMemory

log = structlog.get_logger()


@dataclass(frozen=True)
class CacheShape:
    """Dims of the pool. Bytes of one position in all layers: 2 * L * K * D * itemsize."""

    num_layers: int
    num_blocks: int
    block_size: int
    num_kv_heads: int
    head_dim: int
    dtype: torch.dtype

    @property
    def row_bytes(self) -> int:
        """Bytes of one position of one layer's K (or V)."""
        return self.num_kv_heads * self.head_dim * self.dtype.itemsize

    @property
    def block_bytes(self) -> int:
        """Bytes of one block in all layers, K and V."""
        return 2 * self.num_layers * self.block_size * self.row_bytes

    def with_blocks(self, num_blocks: int) -> CacheShape:
        """The same shape with another number of blocks."""
        return replace(self, num_blocks=num_blocks)


class KVCache:
    """The tensors. `k[layer]` and `v[layer]` are [num_blocks, block_size, K, D], views of one piece of memory.

    shareable: other processes may be let read it, where that is possible; `memory` tells.
    """

    def __init__(self, shape: CacheShape, device: torch.device, *, shareable: bool = False) -> None:
        self.shape = shape
        self.device = device
        dims = (shape.num_blocks, shape.block_size, shape.num_kv_heads, shape.head_dim)
        self._shared: SharedMemory | None = None
        all_dims = (len(KINDS) * shape.num_layers, *dims)
        if device.type == "cpu":
            self._whole = self._in_host_memory(all_dims, shareable=shareable)
        else:
            self._whole = torch.empty(all_dims, dtype=shape.dtype, device=device)
        self.k = list(self._whole[0::2])
        self.v = list(self._whole[1::2])

    @property
    def memory(self) -> PoolMemory:
        """Where it lies. Raises ValueError unless that is host memory."""
        if self.device.type != "cpu":
            raise ValueError("only a cache in host memory can be viewed as bytes")
        content = memoryview(self._whole.view(-1).view(torch.uint8).numpy().data)
        shape = self.shape
        num_regions = len(KINDS) * shape.num_layers
        return PoolMemory(content, num_regions, shape.num_blocks, shape.block_size, self._shared)

    def _in_host_memory(self, dims: tuple[int, ...], *, shareable: bool) -> Tensor:
        num_bytes = math.prod(dims) * self.shape.dtype.itemsize
        if shareable:
            try:
                self._shared = SharedMemory(num_bytes)
            except (OSError, AttributeError) as exc:
                log.warning("kv_pool_not_shareable", reason=str(exc))
        content = self._shared.content if self._shared else own_memory(num_bytes)
        return torch.frombuffer(content, dtype=self.shape.dtype).view(dims)

    def write(self, layer: int, slots_T: Tensor, k_TKD: Tensor, v_TKD: Tensor) -> None:
        """Store T positions. slots_T: (T,) int64, distinct, block id * block_size + offset."""
        self.k[layer].flatten(0, 1).index_copy_(0, slots_T, k_TKD)
        self.v[layer].flatten(0, 1).index_copy_(0, slots_T, v_TKD)

    def read(self, layer: int, blocks: BlockRun, num_tokens: int) -> tuple[Tensor, Tensor]:
        """K and V of the first `num_tokens` positions of a block table, each (S, K, D).

        A view when the blocks are adjacent, else a gathered copy.
        """
        if blocks.adjacent:
            start, stop = blocks.ids[0], blocks.ids[0] + len(blocks.ids)
            k, v = self.k[layer][start:stop], self.v[layer][start:stop]
        else:
            k = self.k[layer].index_select(0, blocks.index)
            v = self.v[layer].index_select(0, blocks.index)
        return k.flatten(0, 1)[:num_tokens], v.flatten(0, 1)[:num_tokens]

    def copy_blocks(self, pairs: Sequence[tuple[int, int]]) -> None:
        """Duplicate blocks (from, to) in every layer."""
        if not pairs:
            return
        source = torch.tensor([a for a, _ in pairs], device=self.device)
        target = torch.tensor([b for _, b in pairs], device=self.device)
        for tensor in (*self.k, *self.v):
            tensor.index_copy_(0, target, tensor.index_select(0, source))


class BlockRun:
    """A block table prepared for reading: `adjacent` if the ids count up by one."""

    def __init__(self, ids: Sequence[int], device: torch.device) -> None:
        self.ids = ids
        self.adjacent = all(b == a + 1 for a, b in pairwise(ids))
        self._device = device
        self._index: Tensor | None = None

    @property
    def index(self) -> Tensor:
        """The ids as an int64 tensor, made when first needed."""
        if self._index is None:
            self._index = torch.tensor(self.ids, device=self._device)
        return self._index

"""KV of one sequence as host bytes when the pool lies on a device: staged chunk by chunk through pinned memory.

The same two interfaces as `shared.kv.block_views`, for any device. A chunk crosses the bus in one copy for all
layers, on a stream of its own, so that the engine computes its next chunk meanwhile. The side stream waits for what
the engine had queued before; the engine waits for nothing, as KV is committed after `chunk_filled` has returned.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from shared.engine.kv_cache import KVCache
from shared.kv.shape import KINDS, Kind


class StagedViews:
    """KvSource or KvSink over a block table; use one object for one direction, from one thread.

    Holds one chunk in host memory: [L, 2, tokens, K, D].
    """

    def __init__(self, cache: KVCache, blocks: Sequence[int]) -> None:
        self._cache = cache
        self._stream: torch.cuda.Stream | None = None
        if cache.device.type == "cuda":
            self._stream = torch.cuda.Stream(cache.device)  # type: ignore[no-untyped-call]
        size = cache.shape.block_size
        table = torch.tensor(blocks, dtype=torch.int64)
        slots = (table[:, None] * size + torch.arange(size)).flatten()
        self._slots = slots.to(cache.device)
        self._range = (0, 0)
        self._host = torch.empty(0)

    def _view(self, layer: int, kind: Kind) -> list[memoryview]:
        return [memoryview(self._host[layer, KINDS.index(kind)].view(torch.uint8).flatten().numpy().data)]

    def _stage(self, start: int, end: int) -> None:
        """New host memory for a chunk; what was sent from the old one may still be read."""
        shape = self._cache.shape
        dims = (shape.num_layers, len(KINDS), end - start, shape.num_kv_heads, shape.head_dim)
        self._host = torch.empty(dims, dtype=shape.dtype, pin_memory=self._stream is not None)
        self._range = (start, end)

    @contextmanager
    def _aside(self) -> Iterator[None]:
        """Queue copies beside the engine's stream, after what it holds now; wait for them at the end."""
        if self._stream is None:
            yield
            return
        self._stream.wait_stream(torch.cuda.default_stream(self._cache.device))
        with torch.cuda.stream(self._stream):
            yield
        self._stream.synchronize()


class StagedSource(StagedViews):
    """Read side: a chunk is fetched when the first of its views is asked for."""

    def views(self, layer: int, kind: Kind, start: int, end: int) -> list[memoryview]:
        """One view of [end - start, K, D]."""
        if self._range != (start, end):
            self._fetch(start, end)
        return self._view(layer, kind)

    def _fetch(self, start: int, end: int) -> None:
        self._stage(start, end)
        slots = self._slots[start:end]
        with self._aside():
            layers = zip(self._cache.k, self._cache.v, strict=True)
            rows = [_rows(tensor).index_select(0, slots) for pair in layers for tensor in pair]
            self._host.flatten(0, 1).copy_(torch.stack(rows), non_blocking=True)


class StagedSink(StagedViews):
    """Write side: a chunk goes to the pool when all of it is here."""

    def views(self, layer: int, kind: Kind, start: int, end: int) -> list[memoryview]:
        """One writable view of [end - start, K, D]."""
        if self._range != (start, end):
            self._stage(start, end)
        return self._view(layer, kind)

    def chunk_filled(self, start: int, end: int) -> None:
        """Copy the chunk into the pool; returns when it is there."""
        slots = self._slots[start:end]
        with self._aside():
            packed = self._host.to(self._cache.device, non_blocking=True)
            for layer in range(self._cache.shape.num_layers):
                _rows(self._cache.k[layer]).index_copy_(0, slots, packed[layer, 0])
                _rows(self._cache.v[layer]).index_copy_(0, slots, packed[layer, 1])


def _rows(tensor: Tensor) -> Tensor:
    """A layer's K or V by slot: [num_blocks * block_size, K, D]."""
    return tensor.flatten(0, 1)

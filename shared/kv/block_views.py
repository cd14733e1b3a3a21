"""KV of one sequence as bytes of a block pool: the source and sink that need no copy, or one.

Per layer and kind the pool is one flat buffer of `num_blocks * block_size` rows; a row is one token's [K, D].
Where a block table names neighbouring blocks one after the other, their views are joined into larger pieces. Where
it does not, a view for each block would cost more than a copy, and numpy copies all blocks of a layer in one call.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from shared.errors import InvariantBroken
from shared.kv.shape import Kind

PoolBytes = Callable[[int, Kind], memoryview]
Rows = np.ndarray[Any, np.dtype[Any]]

# Handling a view costs about a microsecond in Python, as much as copying so many bytes within the core's cache.
SMALL_VIEW_BYTES = 16 * 1024


def block_runs(block_table: Sequence[int], block_size: int, start: int, end: int) -> list[tuple[int, int]]:
    """Half-open slot ranges that hold token positions [start, end), in order, neighbours joined."""
    if not 0 <= start <= end <= len(block_table) * block_size:
        raise InvariantBroken(f"positions [{start}, {end}) are outside a table of {len(block_table)} blocks")
    runs: list[tuple[int, int]] = []
    position = start
    while position < end:
        index, offset = divmod(position, block_size)
        taken = min(block_size - offset, end - position)
        slot = block_table[index] * block_size + offset
        if runs and runs[-1][1] == slot:
            runs[-1] = (runs[-1][0], slot + taken)
        else:
            runs.append((slot, slot + taken))
        position += taken
    return runs


@dataclass(frozen=True, slots=True)
class _Plan:
    """How to copy a range of rows: its whole blocks at once, and what lies before and after them.

    edges: (bytes of the range, bytes of the pool). middle: bytes of the range that are whole blocks, which the
    pool has at `blocks`.
    """

    edges: tuple[tuple[slice, slice], ...]
    middle: slice
    blocks: Rows


class BlockViews:
    """A sequence's KV in a pool. Implements KvSource, KvSink, Scattered and InBlocks.

    pool: (layer, kind) -> flat view of format "B" over that layer's K or V; read-only will do to send.
    block_table: blocks of the sequence from position 0 on; it may grow, but not change.
    """

    def __init__(self, pool: PoolBytes, block_table: Sequence[int], block_size: int, row_bytes: int) -> None:
        self._pool = pool
        self._block_table = block_table
        self._block_size = block_size
        self._row_bytes = row_bytes
        self._range = (0, 0)
        self._spans: list[slice] = []
        self._block_dtype = np.dtype(f"V{block_size * row_bytes}")
        self._planned = (0, 0)
        self._plan = self._plan_of(0, 0)

    def views(self, layer: int, kind: Kind, start: int, end: int) -> list[memoryview]:
        """The bytes of [end - start, K, D] in the pool, in order of position."""
        pool = self._pool(layer, kind)
        return [pool[span] for span in self._spans_of(start, end)]

    def blocks(self, start: int, end: int) -> Sequence[int]:
        """The blocks that hold these positions."""
        size = self._block_size
        return self._block_table[start // size : -(-end // size)]

    def chunk_filled(self, start: int, end: int) -> None:
        """Nothing to do: the bytes are where they belong."""

    def is_scattered(self, start: int, end: int) -> bool:
        """Whether the blocks lie so far apart that copying beats viewing."""
        runs = self._spans_of(start, end)
        return len(runs) > 1 and (end - start) * self._row_bytes < len(runs) * SMALL_VIEW_BYTES

    def copy_out(self, layer: int, kind: Kind, start: int, end: int, into: memoryview) -> None:
        """Gather the bytes of [end - start, K, D]."""
        pool, plan = self._pool(layer, kind), self._plan_of(start, end)
        for own, theirs in plan.edges:
            into[own] = pool[theirs]
        if len(plan.blocks):
            # NOTE: mode "raise" would go through a buffer; the indices come from a checked block table.
            self._blocks_of(pool).take(plan.blocks, out=self._blocks_of(into[plan.middle]), mode="clip")

    def copy_in(self, layer: int, kind: Kind, start: int, end: int, content: memoryview) -> None:
        """Scatter the bytes of [end - start, K, D]."""
        pool, plan = self._pool(layer, kind), self._plan_of(start, end)
        for own, theirs in plan.edges:
            pool[theirs] = content[own]
        if len(plan.blocks):
            self._blocks_of(pool)[plan.blocks] = self._blocks_of(content[plan.middle])

    def _blocks_of(self, content: memoryview) -> Rows:
        """The bytes as items of one block each, which numpy moves as wholes."""
        return np.frombuffer(content, dtype=self._block_dtype)

    def _spans_of(self, start: int, end: int) -> list[slice]:
        if self._range != (start, end):
            row = self._row_bytes
            runs = block_runs(self._block_table, self._block_size, start, end)
            self._spans = [slice(first * row, last * row) for first, last in runs]
            self._range = (start, end)
        return self._spans

    def _plan_of(self, start: int, end: int) -> _Plan:
        if self._planned == (start, end) and start < end:
            return self._plan
        size, row = self._block_size, self._row_bytes
        first = min(-(-start // size) * size, end)
        last = max(end // size * size, first)
        blocks = np.asarray(self._block_table[first // size : last // size], dtype=np.intp)
        edges = []
        for edge_start, edge_end in ((start, first), (last, end)):
            # Each lies in one block, so it is at most one run.
            for begin, stop in block_runs(self._block_table, size, edge_start, edge_end):
                own = slice((edge_start - start) * row, (edge_end - start) * row)
                edges.append((own, slice(begin * row, stop * row)))
        middle = slice((first - start) * row, (last - start) * row)
        self._plan = _Plan(tuple(edges), middle, blocks)
        self._planned = (start, end)
        return self._plan

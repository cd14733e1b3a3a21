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
class _Copy:
    """How to copy rows [start, end) at once: `units` of `unit_bytes` each, which the pool has at `index`."""

    start: int
    end: int
    unit_bytes: int
    index: Rows


class BlockViews:
    """A sequence's KV in a pool. Implements KvSource, KvSink and Scattered.

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
        self._copies_range = (0, 0)
        self._copies: list[_Copy] = []

    def views(self, layer: int, kind: Kind, start: int, end: int) -> list[memoryview]:
        """The bytes of [end - start, K, D] in the pool, in order of position."""
        pool = self._pool(layer, kind)
        return [pool[span] for span in self._spans_of(start, end)]

    def chunk_filled(self, start: int, end: int) -> None:
        """Nothing to do: the bytes are where they belong."""

    def is_scattered(self, start: int, end: int) -> bool:
        """Whether the blocks lie so far apart that copying beats viewing."""
        runs = self._spans_of(start, end)
        return len(runs) > 1 and (end - start) * self._row_bytes < len(runs) * SMALL_VIEW_BYTES

    def copy_out(self, layer: int, kind: Kind, start: int, end: int, into: memoryview) -> None:
        """Gather the bytes of [end - start, K, D]."""
        pool = self._pool(layer, kind)
        for copy in self._copies_of(start, end):
            # NOTE: mode "raise" would go through a buffer; the indices come from a checked block table.
            _units(pool, copy).take(copy.index, out=_units(self._part(into, copy, start), copy), mode="clip")

    def copy_in(self, layer: int, kind: Kind, start: int, end: int, content: memoryview) -> None:
        """Scatter the bytes of [end - start, K, D]."""
        pool = self._pool(layer, kind)
        for copy in self._copies_of(start, end):
            _units(pool, copy)[copy.index] = _units(self._part(content, copy, start), copy)

    def _part(self, content: memoryview, copy: _Copy, start: int) -> memoryview:
        return content[(copy.start - start) * self._row_bytes : (copy.end - start) * self._row_bytes]

    def _spans_of(self, start: int, end: int) -> list[slice]:
        if self._range != (start, end):
            row = self._row_bytes
            runs = block_runs(self._block_table, self._block_size, start, end)
            self._spans = [slice(first * row, last * row) for first, last in runs]
            self._range = (start, end)
        return self._spans

    def _copies_of(self, start: int, end: int) -> list[_Copy]:
        """Whole blocks in one copy; the rows before and after them in one each."""
        if self._copies_range != (start, end):
            size = self._block_size
            first, last = -(-start // size) * size, end // size * size
            self._copies = [self._rows(start, min(first, end))]
            if first < last:
                blocks = np.asarray(self._block_table[first // size : last // size], dtype=np.intp)
                self._copies.append(_Copy(first, last, size * self._row_bytes, blocks))
            if first <= last:
                self._copies.append(self._rows(last, end))
            self._copies = [copy for copy in self._copies if copy.start < copy.end]
            self._copies_range = (start, end)
        return self._copies

    def _rows(self, start: int, end: int) -> _Copy:
        runs = block_runs(self._block_table, self._block_size, start, end)
        slots = [slot for run in runs for slot in range(*run)]
        return _Copy(start, end, self._row_bytes, np.asarray(slots, dtype=np.intp))


def _units(content: memoryview, copy: _Copy) -> Rows:
    """The bytes as items of `unit_bytes` each, which numpy moves as wholes. A remainder is left out."""
    usable = len(content) // copy.unit_bytes * copy.unit_bytes
    return np.frombuffer(content[:usable], dtype=f"V{copy.unit_bytes}")

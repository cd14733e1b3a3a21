"""KV of one sequence as byte views of a block pool: the source and sink that need no copy.

Per layer and kind the pool is one flat buffer of `num_blocks * block_size` rows; a row is one token's [K, D].
Where a block table names neighbouring blocks one after the other, their views are joined into larger pieces.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from shared.errors import InvariantBroken
from shared.kv.shape import Kind

PoolBytes = Callable[[int, Kind], memoryview]


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


class BlockViews:
    """A sequence's KV in a pool. Implements KvSource and KvSink.

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

    def views(self, layer: int, kind: Kind, start: int, end: int) -> list[memoryview]:
        """The bytes of [end - start, K, D] in the pool, in order of position."""
        if self._range != (start, end):
            row = self._row_bytes
            runs = block_runs(self._block_table, self._block_size, start, end)
            self._spans = [slice(first * row, last * row) for first, last in runs]
            self._range = (start, end)
        pool = self._pool(layer, kind)
        return [pool[span] for span in self._spans]

    def chunk_filled(self, start: int, end: int) -> None:
        """Nothing to do: the bytes are where they belong."""

"""KV of one sequence as bytes of a block pool: the source and sink that need no copy, or one.

Per layer and kind the pool has one region of `num_blocks * block_size` rows; a row is one token's [K, D].
Where a block table names neighbouring blocks one after the other, their views are joined into larger pieces. Where
it does not, a view for each block would cost more than a copy. numpy copies rows of many tensors in one call.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from shared.errors import InvariantBroken
from shared.kv.copy_rows import Pieces, Place
from shared.kv.pool_memory import PoolMemory, Rows
from shared.kv.shape import Kind, tensor_index

# Handling a view costs about a microsecond in Python, as much as copying so many bytes within the core's cache.
SMALL_VIEW_BYTES = 16 * 1024

# Every tensor of a chunk has the same ranges, as many as batches are cut from one.
_MAX_PLANS = 256


def block_runs(block_table: Sequence[int], block_size: int, start: int, end: int) -> list[tuple[int, int]]:
    """Half-open slot ranges that hold token positions [start, end), in order, neighbours joined."""
    if not 0 <= start <= end <= len(block_table) * block_size:
        raise InvariantBroken(f"positions [{start}, {end}) are outside a table of {len(block_table)} blocks")
    first = start // block_size
    blocks = list(block_table[first : -(-end // block_size)])
    if start < end and blocks == list(range(blocks[0], blocks[0] + len(blocks))):
        # As nearly always. Going through the blocks of 1,024 tokens one by one takes a tenth of a millisecond.
        origin = (int(blocks[0]) - first) * block_size
        return [(origin + start, origin + end)]
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


def one_tensor(layer: int, kind: Kind) -> slice:
    """That tensor alone, where many can be named."""
    at = tensor_index(layer, kind)
    return slice(at, at + 1)


Slices = tuple[tuple[slice, slice], ...]


@dataclass(frozen=True, slots=True)
class _Gather:
    """A scattered range, copied by blocks: those that make up `middle` of its bytes, and the pieces beside them."""

    blocks: Rows
    middle: slice
    edges: Slices


@dataclass(frozen=True, slots=True)
class _Plan:
    """Where a range is: runs of neighbouring blocks, (its bytes, bytes of a region); or how to gather it."""

    runs: Slices
    gather: _Gather | None = None


class BlockViews:
    """A sequence's KV in a pool. Implements KvSource and KvSink, and copies rows of many tensors in one call.

    block_table: blocks of the sequence from position 0 on; it may grow, but not change. row_bytes: of one token in
    one region. `tensors` are those of a chunk in file order, as are the pool's regions.
    """

    def __init__(self, memory: PoolMemory, block_table: Sequence[int], row_bytes: int) -> None:
        self.memory = memory
        self._block_table = block_table
        self._block_size = memory.block_size
        self._row_bytes = row_bytes
        self._block_dtype = np.dtype(f"V{memory.block_size * row_bytes}")
        self._plans: dict[tuple[int, int], _Plan] = {}

    def views(self, layer: int, kind: Kind, start: int, end: int) -> list[memoryview]:
        """The bytes of [end - start, K, D] in the pool, in order of position."""
        return self.tensor_views(one_tensor(layer, kind), start, end)[0]

    def tensor_views(self, tensors: slice, start: int, end: int) -> list[list[memoryview]]:
        """The same of each of many tensors."""
        plan = self._plan_of(start, end)
        runs = [theirs for _, theirs in plan.runs or self._runs(start, end, start)]
        return [[region[run] for run in runs] for region in self.memory.regions[tensors]]

    def blocks(self, start: int, end: int) -> Sequence[int]:
        """The blocks that hold these positions."""
        size = self._block_size
        return self._block_table[start // size : -(-end // size)]

    def chunk_filled(self, start: int, end: int) -> None:
        """Nothing to do: the bytes are where they belong."""

    def is_scattered(self, start: int, end: int) -> bool:
        """Whether the blocks lie so far apart that copying beats viewing."""
        return self._plan_of(start, end).gather is not None

    def look_up(self, start: int, end: int) -> None:
        """Work out now where these positions are, and not when they are wanted."""
        self._plan_of(start, end)

    def adjacent_rows(self, tensors: slice, start: int, end: int) -> Rows | None:
        """The bytes where they lie, [tensors, bytes], if they are in one piece of each region."""
        runs = self._plan_of(start, end).runs
        return self.memory.rows[tensors, runs[0][1]] if len(runs) == 1 else None

    def place(self, first: int) -> Place:
        """The regions of that tensor and of all after it."""
        memory = self.memory
        address = memory.extent[0] + first * memory.region_bytes
        return Place(address, len(memory.regions) - first, memory.region_bytes)

    def pieces(self, start: int, end: int) -> Pieces:
        """Where [start, end) lies in a region."""
        plan = self._plan_of(start, end)
        gather = plan.gather
        if gather is None:
            return _as_pieces(plan.runs)
        num_bytes = self._block_size * self._row_bytes
        blocks = np.stack([gather.blocks * num_bytes, np.full_like(gather.blocks, num_bytes)], axis=1)
        before = _as_pieces(edge for edge in gather.edges if edge[0].start < gather.middle.start)
        after = _as_pieces(edge for edge in gather.edges if edge[0].start >= gather.middle.stop)
        parts = (np.array(part, dtype=np.int64).reshape(-1, 2) for part in (before, blocks, after))
        return np.concatenate(list(parts))

    def copy_out(self, tensors: slice, start: int, end: int, into: Rows) -> None:
        """Gather positions [start, end). into: uint8 [tensors, bytes]."""
        rows, plan = self.memory.rows[tensors], self._plan_of(start, end)
        gather = plan.gather
        for own, theirs in plan.runs if gather is None else gather.edges:
            into[:, own] = rows[:, theirs]
        if gather is not None and len(gather.blocks):
            # NOTE: mode "raise" would go through a buffer; the indices come from a checked block table.
            target = into[:, gather.middle].view(self._block_dtype)
            rows.view(self._block_dtype).take(gather.blocks, axis=1, out=target, mode="clip")

    def copy_in(self, tensors: slice, start: int, end: int, content: Rows) -> None:
        """Scatter positions [start, end). content: uint8 [tensors, bytes]."""
        rows, plan = self.memory.rows[tensors], self._plan_of(start, end)
        gather = plan.gather
        for own, theirs in plan.runs if gather is None else gather.edges:
            rows[:, theirs] = content[:, own]
        if gather is not None and len(gather.blocks):
            whole = content[:, gather.middle].view(self._block_dtype)
            rows.view(self._block_dtype)[:, gather.blocks] = whole

    def _plan_of(self, start: int, end: int) -> _Plan:
        key = (start, end)
        plan = self._plans.get(key)
        if plan is None:
            if len(self._plans) >= _MAX_PLANS:
                self._plans.clear()
            plan = self._plans[key] = self._new_plan(start, end)
        return plan

    def _new_plan(self, start: int, end: int) -> _Plan:
        size, row = self._block_size, self._row_bytes
        runs = self._runs(start, end, start)
        if len(runs) < 2 or (end - start) * row >= len(runs) * SMALL_VIEW_BYTES:
            return _Plan(runs)
        first = min(-(-start // size) * size, end)
        last = max(end // size * size, first)
        edges = self._runs(start, first, start) + self._runs(last, end, start)
        blocks = np.asarray(self._block_table[first // size : last // size], dtype=np.intp)
        middle = slice((first - start) * row, (last - start) * row)
        return _Plan((), _Gather(blocks, middle, edges))

    def _runs(self, start: int, end: int, origin: int) -> Slices:
        """Pieces of [start, end): where they are among the bytes from `origin` on, and in a region."""
        row = self._row_bytes
        at, found = (start - origin) * row, []
        for first, last in block_runs(self._block_table, self._block_size, start, end):
            num_bytes = (last - first) * row
            found.append((slice(at, at + num_bytes), slice(first * row, last * row)))
            at += num_bytes
        return tuple(found)


def _as_pieces(runs: Iterable[tuple[slice, slice]]) -> list[tuple[int, int]]:
    return [(theirs.start, theirs.stop - theirs.start) for _, theirs in runs]

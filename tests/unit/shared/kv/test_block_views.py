"""Rows of a sequence in a pool: viewed, gathered and scattered, they are the same bytes."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import InvariantBroken
from shared.kv.block_views import SMALL_VIEW_BYTES, BlockViews, block_runs
from shared.kv.pool_memory import PoolMemory

ROW_BYTES = 8
NUM_REGIONS = 4


def pool_of(num_blocks: int, block_size: int, seed: int) -> PoolMemory:
    """Random bytes."""
    content = bytearray(np.random.default_rng(seed).bytes(NUM_REGIONS * num_blocks * block_size * ROW_BYTES))
    return PoolMemory(memoryview(content), NUM_REGIONS, num_blocks, block_size)


@st.composite
def ranges(draw: st.DrawFn) -> tuple[int, list[int], int, int]:
    """Block size, block table, and a range of positions within it."""
    block_size = draw(st.sampled_from([1, 3, 16]))
    table = draw(st.lists(st.integers(0, 11), min_size=1, max_size=12, unique=True))
    start = draw(st.integers(0, len(table) * block_size))
    return block_size, table, start, draw(st.integers(start, len(table) * block_size))


@given(ranges(), st.slices(NUM_REGIONS).filter(lambda tensors: tensors.step in (None, 1)))
def test_gathered_and_scattered_rows_are_those_of_the_views(
    drawn: tuple[int, list[int], int, int], tensors: slice
) -> None:
    """For any table and range; and everything else in the pool stays as it was."""
    block_size, table, start, end = drawn
    source = BlockViews(pool_of(12, block_size, 1), table, ROW_BYTES)
    wanted = [b"".join(views) for views in source.tensor_views(tensors, start, end)]
    gathered = np.zeros((len(wanted), (end - start) * ROW_BYTES), dtype=np.uint8)
    source.copy_out(tensors, start, end, gathered)
    assert wanted == [bytes(row) for row in gathered]
    rows = source.adjacent_rows(tensors, start, end)
    assert rows is None or wanted == [bytes(row) for row in rows]
    pool = pool_of(12, block_size, 2)
    target = BlockViews(pool, table, ROW_BYTES)
    before = pool.rows.copy()
    target.copy_in(tensors, start, end, gathered)
    assert wanted == [b"".join(views) for views in target.tensor_views(tensors, start, end)]
    for views in target.tensor_views(tensors, start, end):
        for view in views:
            view[:] = bytes(len(view))
    blank = BlockViews(
        PoolMemory(memoryview(before.reshape(-1).data), NUM_REGIONS, 12, block_size), table, ROW_BYTES
    )
    for views in blank.tensor_views(tensors, start, end):
        for view in views:
            view[:] = bytes(len(view))
    assert np.array_equal(before, pool.rows)


def test_what_is_scattered() -> None:
    """Pieces too small to be worth a view each; one piece never is."""
    pool = pool_of(8, SMALL_VIEW_BYTES // ROW_BYTES, 1)
    size = pool.block_size
    assert not BlockViews(pool, [5, 2], ROW_BYTES).is_scattered(0, 2 * size)
    assert BlockViews(pool, [5, 2], ROW_BYTES).is_scattered(1, 2 * size)
    assert not BlockViews(pool, [5, 6], ROW_BYTES).is_scattered(1, 2 * size)


def test_positions_beyond_the_table_are_refused() -> None:
    """Before anything is copied."""
    with pytest.raises(InvariantBroken, match="outside"):
        block_runs([1, 2], 16, 0, 33)
    with pytest.raises(InvariantBroken, match="outside"):
        BlockViews(pool_of(8, 16, 1), [1, 2], ROW_BYTES).tensor_views(slice(0, 1), 0, 33)

"""Pages that are there before blocks are used: how many, and that nothing in them changes."""

from __future__ import annotations

import time
from contextlib import closing

import pytest

from shared.kv.host_memory import own_memory
from shared.kv.pages_ahead import PagesAhead
from shared.kv.pool_memory import PoolMemory
from shared.kv.shared_memory import SharedMemory
from tests.unit.shared.kv.test_host_memory import mapping_at

NUM_REGIONS, NUM_BLOCKS, BLOCK_BYTES = 4, 1024, 16 * 1024
AHEAD = 256
WAIT_S = 10.0


def _pool(*, shareable: bool = False) -> PoolMemory:
    num_bytes = NUM_REGIONS * NUM_BLOCKS * BLOCK_BYTES
    shared = SharedMemory(num_bytes) if shareable else None
    content = own_memory(num_bytes) if shared is None else shared.content
    return PoolMemory(content, NUM_REGIONS, NUM_BLOCKS, 16, shared)


def _ahead(pool: PoolMemory) -> PagesAhead:
    return PagesAhead(pool, AHEAD * NUM_REGIONS * BLOCK_BYTES)


def _resident_bytes(pool: PoolMemory) -> int:
    return int(mapping_at(pool.extent[0])["Rss"].split()[0]) * 1024


@pytest.mark.parametrize("shareable", [False, True])
def test_pages_are_there_before_they_are_touched(*, shareable: bool) -> None:
    """Of the blocks that come next, in every region, and of few more; what was written before stays."""
    pool = _pool(shareable=shareable)
    pool.regions[1][:5] = b"there"
    with closing(_ahead(pool)) as ahead:
        ahead.take()
        assert AHEAD == ahead.num_taken
        wanted = AHEAD * NUM_REGIONS * BLOCK_BYTES
        assert wanted <= _resident_bytes(pool) < 2 * wanted
        assert b"there" == bytes(pool.regions[1][:5])
        ahead.take(2 * NUM_BLOCKS)
        assert NUM_BLOCKS == ahead.num_taken
        assert pool.extent[1] == _resident_bytes(pool)


def test_it_keeps_ahead_of_use() -> None:
    """In the background, once half of what is ahead is used up; not for every request."""
    with closing(_ahead(_pool())) as ahead:
        ahead.take()
        ahead.reach(AHEAD // 2 - 1)
        time.sleep(0.05)
        assert AHEAD == ahead.num_taken
        ahead.reach(AHEAD // 2)
        due = time.monotonic() + WAIT_S
        while ahead.num_taken < AHEAD // 2 + 1 + AHEAD:
            assert time.monotonic() < due
            time.sleep(0.001)
        ahead.close()
        ahead.reach(NUM_BLOCKS - 1)


def test_a_system_that_does_not_know_it_is_left_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing is asked for again, and nothing fails."""
    calls: list[object] = []

    def refuse(*given: object) -> int:
        calls.append(given)
        return -1

    with closing(_ahead(_pool())) as ahead:
        monkeypatch.setattr(ahead, "_madvise", refuse)
        ahead.take()
        ahead.take(NUM_BLOCKS)
    assert 1 == len(calls)

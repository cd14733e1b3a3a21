"""The block pool, case by case."""

from __future__ import annotations

import pytest

from shared.engine.blocks import BlockPool, Lease, PoolCounts, prefix_hashes
from shared.errors import InvariantBroken


def _lease(pool: BlockPool, num_blocks: int) -> Lease:
    lease = pool.admit([], num_blocks)
    assert lease is not None
    return lease


def _cached(pool: BlockPool, names: list[bytes]) -> list[int]:
    """Make one cached block of each name, freed in this order."""
    lease = _lease(pool, len(names))
    blocks = [lease.take() for _ in names]
    for block, name in zip(blocks, names, strict=True):
        pool.register(block, name)
    for block in blocks:
        pool.free(block)
    return blocks


def test_a_name_stands_for_the_block_and_everything_before_it() -> None:
    """Equal blocks after different beginnings have different names; a partial block has none."""
    one, other = prefix_hashes([1, 2, 3, 4, 5], 2), prefix_hashes([9, 2, 3, 4, 5], 2)
    assert 2 == len(one) == len(other)
    assert one[1] != other[1]
    assert one == prefix_hashes([1, 2, 3, 4, 6], 2)


def test_tokens_above_two_bytes_do_not_collide() -> None:
    """Token ids are named by all of their 32 bits."""
    assert prefix_hashes([1], 1) != prefix_hashes([1 + (1 << 16)], 1) != prefix_hashes([1 + (1 << 24)], 1)


def test_a_lease_counts_as_taken_before_it_is_used() -> None:
    """Promised blocks are not given to a second request."""
    pool = BlockPool(4, 2)
    lease = _lease(pool, 3)
    assert pool.admit([], 2) is None
    assert 1 == pool.num_available
    lease.close()
    lease.close()
    assert 4 == pool.num_available


def test_a_lease_gives_no_more_than_was_promised() -> None:
    """Taking beyond the worst case is our own mistake, and is said."""
    pool = BlockPool(4, 2)
    lease = _lease(pool, 1)
    lease.take()
    with pytest.raises(InvariantBroken, match="worst case"):
        lease.take()


def test_a_refused_admission_changes_nothing() -> None:
    """Sharing and promising happen together or not at all."""
    pool = BlockPool(3, 2)
    names = [b"a", b"b"]
    _cached(pool, names)
    before = pool.counts()
    assert pool.admit(pool.lookup(names), 2) is None
    assert before == pool.counts()
    pool.check_integrity()


def test_waking_cached_blocks_counts_against_the_room() -> None:
    """A cached block that is shared can no longer be evicted for the same request."""
    pool = BlockPool(3, 2)
    names = [b"a", b"b"]
    _cached(pool, names)
    lease = pool.admit(pool.lookup(names), 1)
    assert lease is not None
    assert PoolCounts(num_blocks=3, allocated=4, freed=2, live=2, cached=0, promised=1) == pool.counts()


def test_the_block_cached_longest_ago_is_evicted_first() -> None:
    """Free blocks go first, then cached ones by age; an evicted one is not found any more."""
    pool = BlockPool(4, 2)
    first, second = _cached(pool, [b"a"]), _cached(pool, [b"b"])
    lease = _lease(pool, 3)
    assert {first[0], second[0]}.isdisjoint({lease.take(), lease.take()})
    assert first[0] == lease.take()
    assert [] == pool.lookup([b"a"])
    assert second == pool.lookup([b"b"])


def test_use_makes_a_cached_block_young_again() -> None:
    """Sharing and freeing moves a block to the end of the eviction order."""
    pool = BlockPool(2, 2)
    old, young = _cached(pool, [b"a"]) + _cached(pool, [b"b"])
    pool.share(old)
    pool.free(old)
    assert young == _lease(pool, 1).take()


def test_lookup_stops_at_the_first_gap() -> None:
    """Blocks behind a missing one are of no use."""
    pool = BlockPool(4, 2)
    blocks = _cached(pool, [b"a", b"c"])
    assert blocks[:1] == pool.lookup([b"a", b"b", b"c"])


def test_the_first_block_of_a_name_wins() -> None:
    """A second copy of known content stays private and becomes free, not cached."""
    pool = BlockPool(4, 2)
    lease = _lease(pool, 2)
    one, copy = lease.take(), lease.take()
    pool.register(one, b"a")
    pool.register(copy, b"a")
    assert [one] == pool.lookup([b"a"])
    pool.free(one)
    pool.free(copy)
    assert 1 == pool.counts().cached


def test_a_shared_block_lives_until_its_last_owner_has_gone() -> None:
    """Each owner frees once."""
    pool = BlockPool(2, 2)
    block = _lease(pool, 1).take()
    pool.share(block)
    pool.free(block)
    assert 1 == pool.owners(block) == pool.counts().live
    pool.free(block)
    assert 0 == pool.counts().live


def test_misuse_is_refused_aloud() -> None:
    """Freeing twice, sharing a free block and naming an unowned one are broken invariants."""
    pool = BlockPool(2, 2)
    block = _lease(pool, 1).take()
    pool.free(block)
    with pytest.raises(InvariantBroken, match="freed twice"):
        pool.free(block)
    with pytest.raises(InvariantBroken, match="neither live nor cached"):
        pool.share(block)
    with pytest.raises(InvariantBroken, match="without an owner"):
        pool.register(block, b"a")


@pytest.mark.parametrize(("num_blocks", "block_size"), [(0, 16), (4, 0), (-1, 1)])
def test_an_empty_pool_is_refused(num_blocks: int, block_size: int) -> None:
    """A pool holds at least one position."""
    with pytest.raises(ValueError, match="at least one"):
        BlockPool(num_blocks, block_size)


def test_leaked_shows_blocks_that_bookkeeping_lost() -> None:
    """The metric is the difference that must be 0."""
    assert 2 == PoolCounts(num_blocks=8, allocated=9, freed=4, live=3, cached=1, promised=0).leaked


def test_what_is_forgotten_is_found_by_nobody() -> None:
    """A cached block is free then; a live one stays its owner's, and another may take the name."""
    pool = BlockPool(4, 2)
    (cached,) = _cached(pool, [b"a"])
    lease = _lease(pool, 2)
    live, other = lease.take(), lease.take()
    pool.register(live, b"b")
    for block in (cached, live, live):
        pool.forget(block)
    assert [] == pool.lookup([b"a"]) == pool.lookup([b"b"])
    assert 0 == pool.counts().cached
    pool.register(other, b"b")
    assert [other] == pool.lookup([b"b"])
    pool.free(live)
    pool.check_integrity()
    assert 3 == pool.num_available

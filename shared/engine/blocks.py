"""The block pool: which blocks are free, who shares them, and which hold a known prefix. Pure bookkeeping.

A block is `block_size` positions of KV in every layer. It is in exactly one of three states:

    free        no owner, content unknown
    cached      no owner, content known by its chained hash; reused by lookup, evicted oldest first
    live        one or more owners (reference count > 0); may be known by hash as well

A lease promises blocks to one request before any work is spent on it; taking from a lease cannot fail.
Only the engine thread calls this; the counters may be read from anywhere.
"""

from __future__ import annotations

import hashlib
from array import array
from collections import OrderedDict, deque
from collections.abc import Sequence
from dataclasses import dataclass

from shared.errors import InvariantBroken

ROOT_HASH = b""


def chain_hash(parent: bytes, token_ids: Sequence[int]) -> bytes:
    """Name of a full block: 16 bytes over the parent's name and this block's token ids."""
    return hashlib.blake2b(parent + array("I", token_ids).tobytes(), digest_size=16).digest()


def prefix_hashes(token_ids: Sequence[int], block_size: int) -> list[bytes]:
    """Chained hashes of every full block of `token_ids`."""
    hashes: list[bytes] = []
    parent = ROOT_HASH
    for start in range(0, len(token_ids) - block_size + 1, block_size):
        parent = chain_hash(parent, token_ids[start : start + block_size])
        hashes.append(parent)
    return hashes


class Lease:
    """Blocks promised to one request: `take` makes one of them live, `close` gives the rest back."""

    def __init__(self, pool: BlockPool, num_blocks: int) -> None:
        self._pool = pool
        self.num_left = num_blocks

    def take(self) -> int:
        """A live block with one owner, content undefined. Raises InvariantBroken beyond the worst case."""
        if self.num_left == 0:
            raise InvariantBroken("a request took more blocks than its worst case")
        self.num_left -= 1
        return self._pool._take_promised()

    def close(self) -> None:
        """Give back what was not taken. Safe to call twice."""
        self._pool._unpromise(self.num_left)
        self.num_left = 0


@dataclass(frozen=True)
class PoolCounts:
    """A snapshot for metrics. allocated - freed - live is 0 unless bookkeeping is broken."""

    num_blocks: int
    allocated: int
    freed: int
    live: int
    cached: int
    promised: int

    @property
    def leaked(self) -> int:
        """Blocks that left their owner without being freed, or the other way round."""
        return self.allocated - self.freed - self.live


class BlockPool:
    """Reference counts, free list, prefix cache and promises over block ids [0, num_blocks)."""

    def __init__(self, num_blocks: int, block_size: int) -> None:
        if num_blocks < 1 or block_size < 1:
            raise ValueError("a pool needs at least one block of at least one position")
        self.num_blocks = num_blocks
        self.block_size = block_size
        self._owners = [0] * num_blocks
        self._name: list[bytes | None] = [None] * num_blocks
        self._by_name: dict[bytes, int] = {}
        self._free: deque[int] = deque(range(num_blocks))
        self._cached: OrderedDict[int, None] = OrderedDict()
        self._promised = 0
        self._num_allocated = 0
        self._num_freed = 0

    @property
    def num_available(self) -> int:
        """Blocks that a new lease may be given: free and cached ones that nobody was promised."""
        return len(self._free) + len(self._cached) - self._promised

    def owners(self, block: int) -> int:
        """Reference count of a block."""
        return self._owners[block]

    def lookup(self, names: Sequence[bytes]) -> list[int]:
        """Blocks that hold the longest known prefix of `names`. Takes no ownership."""
        found: list[int] = []
        for name in names:
            block = self._by_name.get(name)
            if block is None:
                break
            found.append(block)
        return found

    def admit(self, shared: Sequence[int], num_new: int) -> Lease | None:
        """Own the `shared` blocks once more and promise `num_new` others; None, and no change, without room."""
        num_woken = sum(1 for block in shared if self._owners[block] == 0)
        if num_woken + num_new > self.num_available:
            return None
        for block in shared:
            self.share(block)
        self._promised += num_new
        return Lease(self, num_new)

    def share(self, block: int) -> None:
        """One more owner for a live or cached block."""
        if self._owners[block] == 0:
            if block not in self._cached:
                raise InvariantBroken(f"block {block} is neither live nor cached")
            del self._cached[block]
            self._num_allocated += 1
        self._owners[block] += 1

    def free(self, block: int) -> None:
        """One owner less; the last one leaves the block cached if its content is known, else free."""
        if self._owners[block] == 0:
            raise InvariantBroken(f"block {block} is freed twice")
        self._owners[block] -= 1
        if self._owners[block] == 0:
            self._num_freed += 1
            if self._name[block] is None:
                self._free.append(block)
            else:
                self._cached[block] = None

    def register(self, block: int, name: bytes) -> None:
        """Make a full, computed, live block findable. The first of a name wins; later copies stay private."""
        if self._owners[block] == 0:
            raise InvariantBroken(f"block {block} is registered without an owner")
        if name not in self._by_name and self._name[block] is None:
            self._by_name[name] = block
            self._name[block] = name

    def forget(self, block: int) -> None:
        """Nobody shall find this block any more; who has it keeps it."""
        name, self._name[block] = self._name[block], None
        if name is not None:
            del self._by_name[name]
            if block in self._cached:
                del self._cached[block]
                self._free.append(block)

    def counts(self) -> PoolCounts:
        """Counters as of now."""
        live = self.num_blocks - len(self._free) - len(self._cached)
        return PoolCounts(
            self.num_blocks, self._num_allocated, self._num_freed, live, len(self._cached), self._promised
        )

    def check_integrity(self) -> None:
        """Raise InvariantBroken unless every block is in exactly one state and the counters agree."""
        free, cached = set(self._free), set(self._cached)
        live = {block for block, owners in enumerate(self._owners) if owners > 0}
        if len(free) != len(self._free) or free & cached or free & live or cached & live:
            raise InvariantBroken("a block is in two states")
        if len(free) + len(cached) + len(live) != self.num_blocks:
            raise InvariantBroken("a block is in no state")
        if self._num_allocated - self._num_freed != len(live):
            raise InvariantBroken("allocated - freed - live is not 0")
        if self._promised < 0 or self.num_available < 0:
            raise InvariantBroken("more blocks are promised than exist")
        named = {block: name for block, name in enumerate(self._name) if name is not None}
        if {name: block for block, name in named.items()} != self._by_name or free & named.keys():
            raise InvariantBroken("the prefix cache and the blocks disagree")

    def _take_promised(self) -> int:
        self._promised -= 1
        if self._free:
            block = self._free.popleft()
        else:
            block, _ = self._cached.popitem(last=False)
            name = self._name[block]
            if name is not None:
                del self._by_name[name]
            self._name[block] = None
        self._owners[block] = 1
        self._num_allocated += 1
        return block

    def _unpromise(self, num_blocks: int) -> None:
        self._promised -= num_blocks

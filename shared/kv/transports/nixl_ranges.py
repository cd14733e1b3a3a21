"""Addresses of rows in block pools, as the NIXL library wants them: (N, 3) of address, length, 0.

What is asked for is worked out for all tensors at once: they have the same rows, and there are many batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shared.kv.block_views import block_runs
from shared.kv.pieces import Batch
from shared.kv.pool_memory import Addresses
from shared.kv.transports.nixl_agent import Ranges


class Ranged:
    """Where a pool has the rows of one chunk.

    bases: address of each region. blocks: that hold the chunk; origin: the first one's position.
    """

    def __init__(
        self, bases: Addresses, blocks: Sequence[int], block_size: int, origin: int, row_bytes: int
    ) -> None:
        self.bases = bases
        self._blocks = blocks
        self._block_size = block_size
        self._origin = origin
        self._row_bytes = row_bytes
        self._known: dict[tuple[int, int], Ranges] = {}

    def ranges(self, batch: Batch) -> Ranges:
        """Of a batch in file order, neighbouring blocks joined."""
        key = (batch.start, batch.end)
        if key not in self._known:
            self._known[key] = _of_regions(self.bases, *self.pieces(*key))
        return _of_batch(self._known[key], batch, len(self.bases))

    def pieces(self, start: int, end: int) -> tuple[Addresses, Addresses]:
        """Offsets in a region, and lengths, of positions [start, end)."""
        runs = block_runs(self._blocks, self._block_size, start - self._origin, end - self._origin)
        bounds = np.array(runs, dtype=np.uint64) * np.uint64(self._row_bytes)
        return bounds[:, 0], bounds[:, 1] - bounds[:, 0]


class Matched:
    """The rows of one chunk in two pools, cut where either has a gap: equal lengths, row by row."""

    def __init__(self, local: Ranged, remote: Ranged) -> None:
        self._sides = (local, remote)
        self.num_tensors = len(local.bases)

    def ranges(self, start: int, end: int) -> tuple[Ranges, Ranges]:
        """Of positions [start, end) in all tensors, tensor by tensor: ours, and the peer's."""
        local, remote = self._sides
        own, theirs, lengths = _cut(local.pieces(start, end), remote.pieces(start, end))
        return _of_regions(local.bases, own, lengths), _of_regions(remote.bases, theirs, lengths)


def _cut(
    own: tuple[Addresses, Addresses], theirs: tuple[Addresses, Addresses]
) -> tuple[Addresses, Addresses, Addresses]:
    """Offsets on both sides, and lengths."""
    if len(own[0]) == len(theirs[0]) == 1:
        return own[0], theirs[0], own[1]
    ends = np.union1d(np.cumsum(own[1]), np.cumsum(theirs[1]))
    lengths = np.diff(ends, prepend=np.uint64(0))
    offsets = []
    for at, num_bytes in (own, theirs):
        own_ends = np.cumsum(num_bytes)
        piece = np.searchsorted(own_ends, ends)
        # Each cut piece ends so far before the end of the piece that it is of.
        offsets.append(at[piece] + num_bytes[piece] - (own_ends[piece] - ends) - lengths)
    return offsets[0], offsets[1], lengths


def packed(remote: Ranges, address: int) -> Ranges:
    """Ranges of the same lengths, one after the other from an address on."""
    local = remote.copy()
    ends = np.cumsum(local[:, 1])
    local[:, 0] = np.uint64(address) + ends - local[:, 1]
    return local


def _of_regions(bases: Addresses, offsets: Addresses, lengths: Addresses) -> Ranges:
    """The same pieces of each region, region by region."""
    made = np.zeros((len(bases), len(offsets), 3), dtype=np.uint64)
    made[:, :, 0] = bases[:, None] + offsets
    made[:, :, 1] = lengths
    return made.reshape(-1, 3)


def _of_batch(ranges: Ranges, batch: Batch, num_tensors: int) -> Ranges:
    """Those of its tensors, from the ranges of the same rows of all."""
    num_pieces = len(ranges) // num_tensors
    return ranges[batch.first * num_pieces : batch.last * num_pieces]

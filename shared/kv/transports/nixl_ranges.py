"""Addresses of rows in block pools, as the NIXL library wants them: (N, 3) of address, length, 0.

What is asked for is worked out for all tensors at once: they have the same rows, and there are many batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shared.kv.block_views import block_runs
from shared.kv.pool_memory import Addresses
from shared.kv.transports.nixl_agent import Ranges


class Ranged:
    """Where a pool has the rows of one chunk.

    bases: address of each region. blocks: that hold the chunk; origin: the first one's position.
    """

    def __init__(
        self, bases: Addresses, blocks: Sequence[int], block_size: int, origin: int, row_bytes: int
    ) -> None:
        self._bases = bases
        self._blocks = blocks
        self._block_size = block_size
        self._origin = origin
        self._row_bytes = row_bytes
        self.num_tensors = len(bases)

    def ranges(self, start: int, end: int) -> Ranges:
        """Positions [start, end) of each tensor, in file order, neighbouring blocks joined."""
        runs = block_runs(self._blocks, self._block_size, start - self._origin, end - self._origin)
        bounds = np.array(runs, dtype=np.uint64) * np.uint64(self._row_bytes)
        made = np.zeros((self.num_tensors, len(runs), 3), dtype=np.uint64)
        made[:, :, 0] = self._bases[:, None] + bounds[:, 0]
        made[:, :, 1] = bounds[:, 1] - bounds[:, 0]
        return made.reshape(-1, 3)


def packed(remote: Ranges, address: int) -> Ranges:
    """Ranges of the same lengths, one after the other from an address on."""
    local = remote.copy()
    ends = np.cumsum(local[:, 1])
    local[:, 0] = np.uint64(address) + ends - local[:, 1]
    return local

"""Addresses of rows in block pools, as the NIXL library wants them: (N, 3) of address, length, 0.

What is asked for is worked out for all tensors at once: they have the same rows, and there are many batches.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from shared.kv.block_views import block_runs
from shared.kv.pool_memory import Addresses
from shared.kv.told_chunk import ToldBlocks
from shared.kv.transports.nixl_agent import Ranges


class Ranged:
    """Where a pool has the rows of one PUT. bases: address of each region."""

    def __init__(self, bases: Addresses, told: ToldBlocks, row_bytes: int) -> None:
        self._bases = bases
        self._told = told
        self._row_bytes = row_bytes
        self.num_tensors = len(bases)

    def ranges(self, start: int, end: int) -> Ranges:
        """Positions [start, end) of each tensor, in file order, neighbouring blocks joined."""
        told = self._told
        runs = block_runs(told.blocks, told.block_size, start - told.origin, end - told.origin)
        bounds = np.array(runs, dtype=np.uint64) * np.uint64(self._row_bytes)
        made = np.zeros((self.num_tensors, len(runs), 3), dtype=np.uint64)
        made[:, :, 0] = self._bases[:, None] + bounds[:, 0]
        made[:, :, 1] = bounds[:, 1] - bounds[:, 0]
        return made.reshape(-1, 3)


def packed(remote: Ranges, addresses: Sequence[int]) -> Ranges:
    """Ranges of the same lengths, one after the other from each address on."""
    lengths = remote[:, 1]
    local = np.zeros((len(addresses), len(remote), 3), dtype=np.uint64)
    local[:, :, 0] = np.array(addresses, dtype=np.uint64)[:, None] + (np.cumsum(lengths) - lengths)
    local[:, :, 1] = lengths
    return local.reshape(-1, 3)

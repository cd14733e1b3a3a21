"""Where a block pool lies in host memory, for a transport that lets a peer read from it."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol, runtime_checkable

import numpy as np


@dataclass(frozen=True, slots=True)
class PoolMemory:
    """regions: flat bytes of each layer's K, then its V, layer by layer. block_size: positions in a block."""

    regions: tuple[memoryview, ...]
    block_size: int

    def addresses(self) -> list[tuple[int, int]]:
        """(address, length) of each region."""
        return [address_of(region) for region in self.regions]


@runtime_checkable
class InBlocks(Protocol):
    """What a source adds if its bytes lie in a `PoolMemory`."""

    def blocks(self, start: int, end: int) -> Sequence[int]:
        """The blocks that hold token positions [start, end), in order."""
        ...


def address_of(memory: memoryview) -> tuple[int, int]:
    """(address, length) of flat bytes; whoever uses it keeps them alive."""
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data), memory.nbytes

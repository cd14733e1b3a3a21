"""Where a block pool lies in host memory, for those who copy from and to it, or let a peer do so."""

from __future__ import annotations

import ctypes
import mmap
from functools import cached_property
from typing import Any

import numpy as np

from shared.kv.shared_memory import SharedMemory

Rows = np.ndarray[Any, np.dtype[Any]]
Addresses = np.ndarray[Any, np.dtype[np.uint64]]


class PoolMemory:
    """Regions of one size, one after the other: each layer's K, then its V, layer by layer.

    content: all of it. block_size: positions in a block. shared: what `content` is of, if a peer may map it.
    rows: uint8 [num_regions, bytes of a region]; regions: the same as flat views of format "B".
    """

    def __init__(
        self,
        content: memoryview | mmap.mmap,
        num_regions: int,
        num_blocks: int,
        block_size: int,
        shared: SharedMemory | None = None,
    ) -> None:
        self.rows = as_rows(content, num_regions)
        self.region_bytes = self.rows.shape[1]
        self.regions = tuple(memoryview(row.data) for row in self.rows)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.shared = shared

    @cached_property
    def extent(self) -> tuple[int, int]:
        """(address, length) of all of it."""
        return int(self.rows.ctypes.data), self.rows.nbytes

    @cached_property
    def addresses(self) -> Addresses:
        """Of each region."""
        numbers = np.arange(len(self.rows), dtype=np.uint64)
        return numbers * np.uint64(self.region_bytes) + np.uint64(self.extent[0])


def as_rows(content: memoryview | mmap.mmap, num_rows: int) -> Rows:
    """A buffer as uint8 [num_rows, bytes of a row]; nothing is copied."""
    return np.frombuffer(content, dtype=np.uint8).reshape(num_rows, -1)


def address_of(memory: memoryview) -> int:
    """Where bytes lie, at least one of them; whoever uses it keeps them alive."""
    if memory.readonly:
        return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data)
    return ctypes.addressof(ctypes.c_char.from_buffer(memory))  # a sixth of numpy's time, for every batch

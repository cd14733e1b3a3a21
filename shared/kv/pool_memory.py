"""Where a block pool lies in host memory, for those who copy from and to it, or let a peer do so.

A pool that a peer may map lies in an anonymous file (memfd): whoever gets the descriptor can read it, nobody can
shrink it, and it is gone with the last process that has it. Mode 0600; no new mapping of it can be written to.
"""

from __future__ import annotations

import fcntl
import mmap
import os
from functools import cached_property
from typing import Any

import numpy as np

from shared.errors import InvalidRequest

Rows = np.ndarray[Any, np.dtype[Any]]
Addresses = np.ndarray[Any, np.dtype[np.uint64]]

_SIZE_SEALS = ("F_SEAL_SEAL", "F_SEAL_SHRINK", "F_SEAL_GROW")
_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; the fcntl module of Python 3.11 does not name it


class PoolMemory:
    """Regions of one size, one after the other: each layer's K, then its V, layer by layer.

    content: all of it. block_size: positions in a block. descriptor: of the file that it begins, if a peer may
    map that.
    rows: uint8 [num_regions, bytes of a region]; regions: the same as flat views of format "B".
    """

    def __init__(
        self,
        content: memoryview | mmap.mmap,
        num_regions: int,
        num_blocks: int,
        block_size: int,
        descriptor: int | None = None,
    ) -> None:
        self.rows: Rows = np.frombuffer(content, dtype=np.uint8).reshape(num_regions, -1)
        self.regions = tuple(memoryview(row.data) for row in self.rows)
        self.num_blocks = num_blocks
        self.block_size = block_size
        self.descriptor = descriptor

    @property
    def extent(self) -> tuple[int, int]:
        """(address, length) of all of it."""
        return int(self.rows.ctypes.data), self.rows.nbytes

    @cached_property
    def addresses(self) -> Addresses:
        """Of each region."""
        num_regions, region_bytes = self.rows.shape
        return np.arange(num_regions, dtype=np.uint64) * np.uint64(region_bytes) + np.uint64(self.extent[0])


def address_of(memory: memoryview) -> tuple[int, int]:
    """(address, length) of flat bytes; whoever uses it keeps them alive."""
    return int(np.frombuffer(memory, dtype=np.uint8).ctypes.data), memory.nbytes


def shared_memory(num_bytes: int) -> tuple[mmap.mmap, int]:
    """Memory that a peer may be let read, and its descriptor. Raises OSError; AttributeError without memfd.

    Pages are taken as they are touched, like those of any other memory.
    """
    descriptor = os.memfd_create("handoff-pool", os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, num_bytes)
        content = mmap.mmap(descriptor, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _size_seals() | _SEAL_FUTURE_WRITE)
    except BaseException:
        os.close(descriptor)
        raise
    return content, descriptor


def mapped(descriptor: int) -> mmap.mmap:
    """A peer's memory, to read. Raises InvalidRequest for what is none, or could be taken away while it is read."""
    try:
        if fcntl.fcntl(descriptor, fcntl.F_GET_SEALS) & _size_seals() != _size_seals():
            raise InvalidRequest("the pool is not sealed")
        return mmap.mmap(descriptor, 0, mmap.MAP_SHARED, mmap.PROT_READ)
    except (OSError, ValueError) as exc:
        raise InvalidRequest("the pool cannot be mapped") from exc


def _size_seals() -> int:
    return sum(getattr(fcntl, name) for name in _SIZE_SEALS)

"""Memory of this process for much data: in huge pages where the system has them for whoever asks.

A pool is reached with fewer lookups of addresses then, also by the kernel when it copies for another process.
"""

from __future__ import annotations

import mmap
from contextlib import suppress


def own_memory(num_bytes: int) -> mmap.mmap:
    """Zeros that nobody else can map. Pages are taken as they are touched. Raises OSError."""
    memory = mmap.mmap(-1, num_bytes, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
    ask_for_huge_pages(memory)
    return memory


def ask_for_huge_pages(memory: mmap.mmap) -> None:
    """For what is not touched yet; where there are none nothing changes."""
    # A kernel without them does not know the advice.
    with suppress(OSError, AttributeError):
        memory.madvise(mmap.MADV_HUGEPAGE)

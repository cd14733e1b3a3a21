"""The pages of a pool, taken shortly before its blocks are used.

The system gives memory when it is first touched, and clears it then: 25 MB of KV that came to blocks which nobody
had used took 10 to 40 ms longer. Taken all at once, a whole pool would be resident that may never be needed.
"""

from __future__ import annotations

import ctypes
import mmap
import threading
from concurrent.futures import ThreadPoolExecutor

import structlog

from shared.kv.pool_memory import PoolMemory

log = structlog.get_logger()

AHEAD_BYTES = 256 << 20

_POPULATE_WRITE = 23  # Linux 5.14; the mmap module does not name it
_STEP_BYTES = 2 << 20  # of a region: as much as one huge page


class PagesAhead:
    """Of one pool, whose blocks are given out for the first time in order of their number. Thread-safe.

    ahead_bytes: of KV for which pages are there beyond the blocks in use.
    """

    def __init__(self, memory: PoolMemory, ahead_bytes: int = AHEAD_BYTES) -> None:
        self._memory = memory  # must stay mapped
        self._addresses = [int(address) for address in memory.addresses]
        self._num_blocks = memory.num_blocks
        self._block_bytes = memory.region_bytes // memory.num_blocks
        self._ahead = max(1, ahead_bytes // (self._block_bytes * len(memory.regions)))
        self._step = max(1, _STEP_BYTES // self._block_bytes)
        self._num_taken = 0
        self._madvise = ctypes.CDLL(None).madvise
        self._lock = threading.Lock()
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kv-pages")

    @property
    def num_taken(self) -> int:
        """Blocks [0, num_taken) have their pages."""
        return self._num_taken

    def reach(self, block: int) -> None:
        """This block is in use: see to the pages of those after it, in the background. Returns at once."""
        if self._num_taken < min(self._num_blocks, block + 1 + self._ahead // 2) and not self._lock.locked():
            try:
                self._thread.submit(self.take, block + 1 + self._ahead)
            except RuntimeError:  # closed
                return

    def take(self, num_blocks: int = 0) -> None:
        """Take the pages of blocks [0, num_blocks), or of as many as are to be ahead, if that is more.

        Where the system cannot, they come when they are touched.
        """
        with self._lock:
            wanted = min(max(num_blocks, self._ahead), self._num_blocks)
            while self._num_taken < wanted:
                last = min(self._num_taken + self._step, wanted)
                if not all(self._populate(address, last) for address in self._addresses):
                    log.info("kv_pages_come_late", reason="this system does not take them in advance")
                    self._num_taken = self._num_blocks
                    return
                self._num_taken = last

    def close(self) -> None:
        """Take no more."""
        self._thread.shutdown(cancel_futures=True)

    def _populate(self, region: int, last: int) -> bool:
        """The pages of a region's blocks up to `last`; what is in them stays."""
        first = (region + self._num_taken * self._block_bytes) // mmap.PAGESIZE * mmap.PAGESIZE
        num_bytes = region + last * self._block_bytes - first
        answer: int = self._madvise(ctypes.c_void_p(first), ctypes.c_size_t(num_bytes), _POPULATE_WRITE)
        return answer == 0

"""Reads over NIXL that go to where the bytes belong, where reading is a call that has ended when it returns."""

from __future__ import annotations

import time
from collections.abc import Callable

from shared.kv.pieces import Batch
from shared.kv.transports.nixl_agent import Prepared, Ranges
from shared.kv.transports.nixl_peers import has_ended
from shared.kv.transports.nixl_ranges import Matched

SHORTEST_PAUSE_S = 0.00005
LONGEST_PAUSE_S = 0.001
# More than a busy host makes of a call of the kernel.
_AT_ONCE_S = 0.05


class DirectReads:
    """The batches of one chunk. What the library looks up for them it looks up once, for all tensors."""

    def __init__(self, matched: Matched, prepare: Callable[[Ranges, Ranges], Prepared]) -> None:
        self._matched = matched
        self._prepare = prepare
        self._prepared: dict[tuple[int, int], tuple[Prepared, int]] = {}

    def read(self, batch: Batch, wait: Callable[[float], None]) -> bool:
        """Read a batch; whether it came at once. However this ends, the library writes there no more.

        wait: so many seconds. Raises ReadFailed, and what `wait` raises.
        """
        began = time.monotonic()
        prepared, num_pieces = self._of_rows(batch.start, batch.end)
        read = prepared.read(batch.first * num_pieces, batch.last * num_pieces)
        pause_s = SHORTEST_PAUSE_S
        try:
            while not read.done():
                wait(pause_s)
                pause_s = min(2 * pause_s, LONGEST_PAUSE_S)
        finally:
            # Should it take time against all expectation: the blocks are this reservation's until it has ended.
            while not has_ended(read):
                time.sleep(LONGEST_PAUSE_S)
        return time.monotonic() - began < _AT_ONCE_S

    def close(self) -> None:
        """Let the library forget them. No read is under way."""
        for prepared, _ in self._prepared.values():
            prepared.close()
        self._prepared.clear()

    def _of_rows(self, start: int, end: int) -> tuple[Prepared, int]:
        """These rows of all tensors, and in how many pieces they are in each."""
        found = self._prepared.get((start, end))
        if found is None:
            local, remote = self._matched.ranges(start, end)
            num_pieces = len(local) // self._matched.num_tensors
            found = self._prepared[start, end] = self._prepare(local, remote), num_pieces
        return found

"""A chunk cut into batches.

The cut depends on layout and batch size alone, so that two sides that agree on the size agree on every batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import NamedTuple

from shared.kv.manifest import Chunk

# One system call, or one slot of a segment, carries a batch.
BATCH_BYTES = 512 * 1024
BATCH_TENSORS = 256


class Batch(NamedTuple):
    """Rows [start, end), positions of the sequence, of each of a chunk's tensors [first, last).

    All rows of several tensors, or some rows of one. As K and V of all layers have one size, there is no other cut.
    """

    first: int
    last: int
    start: int
    end: int
    num_bytes: int

    @property
    def tensors(self) -> slice:
        """Which of the chunk's tensors, in file order."""
        return slice(self.first, self.last)

    @property
    def num_tensors(self) -> int:
        """How many those are."""
        return self.last - self.first


def cut(chunk: Chunk, num_tensors: int, row_bytes: int, max_bytes: int = BATCH_BYTES) -> Iterator[Batch]:
    """The chunk's bytes in file order, in batches of at most `max_bytes` (but at least one row)."""
    start, end = chunk
    num_rows, max_rows = end - start, max(1, max_bytes // row_bytes)
    if num_rows <= max_rows:
        step = min(max_rows // num_rows, BATCH_TENSORS)
        for first in range(0, num_tensors, step):
            last = min(first + step, num_tensors)
            yield Batch(first, last, start, end, (last - first) * num_rows * row_bytes)
        return
    step = -(-num_rows // -(-num_rows // max_rows))
    for tensor in range(num_tensors):
        for at in range(start, end, step):
            stop = min(at + step, end)
            yield Batch(tensor, tensor + 1, at, stop, (stop - at) * row_bytes)


def num_batches(chunk: Chunk, num_tensors: int, row_bytes: int, max_bytes: int) -> int:
    """How many `cut` gives, for chunks of any number without making them."""
    num_rows, max_rows = chunk[1] - chunk[0], max(1, max_bytes // row_bytes)
    if num_rows <= max_rows:
        return -(-num_tensors // min(max_rows // num_rows, BATCH_TENSORS))
    return num_tensors * -(-num_rows // max_rows)

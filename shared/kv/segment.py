"""A ring of slots in memory that two processes share: the sender owns and fills it, the receiver only reads it.

Of `shared.kv.shared_memory`, with all its pages from the start on. A second descriptor, an eventfd, counts the
slots that the reader has emptied; the owner fills a slot again only then.
"""

from __future__ import annotations

import contextlib
import mmap
import os
from dataclasses import dataclass

from shared.errors import InvalidRequest
from shared.kv.shared_memory import check_sealed, seal, sealed_file

MAX_SEGMENT_BYTES = 64 * 1024 * 1024


@dataclass(frozen=True, slots=True)
class SegmentShape:
    """num_slots slots of slot_bytes each. Raises ValueError beyond MAX_SEGMENT_BYTES."""

    num_slots: int
    slot_bytes: int

    def __post_init__(self) -> None:
        if self.num_slots < 1 or self.slot_bytes < 1 or self.nbytes > MAX_SEGMENT_BYTES:
            raise ValueError("a segment has at least one slot of one byte, and its size is bounded")

    @property
    def nbytes(self) -> int:
        """The whole segment."""
        return self.num_slots * self.slot_bytes

    def __str__(self) -> str:
        return f"{self.num_slots}x{self.slot_bytes}"

    @classmethod
    def parse(cls, text: str) -> SegmentShape:
        """Read what `str` wrote. Raises InvalidRequest."""
        try:
            num_slots, slot_bytes = (int(part) for part in text.split("x"))
            return cls(num_slots, slot_bytes)
        except ValueError as exc:
            raise InvalidRequest("the segment's shape cannot be read") from exc


class Segment:
    """What both sides have in common: two descriptors and a mapping; slots are used in turn."""

    def __init__(self, memory_fd: int, emptied_fd: int, shape: SegmentShape, *, writable: bool) -> None:
        self.shape = shape
        self.memory_fd = memory_fd
        self.emptied_fd = emptied_fd
        access = mmap.PROT_READ | (mmap.PROT_WRITE if writable else 0)
        self._mapping = mmap.mmap(memory_fd, shape.nbytes, mmap.MAP_SHARED | mmap.MAP_POPULATE, access)
        self._view = memoryview(self._mapping)

    def slot(self, position: int) -> memoryview:
        """The slot for the `position`-th batch."""
        at = position % self.shape.num_slots * self.shape.slot_bytes
        return self._view[at : at + self.shape.slot_bytes]

    def close(self) -> None:
        """Unmap and give the descriptors back."""
        self._view.release()
        # A view that is still alive somewhere (in a traceback) unmaps it when it goes.
        with contextlib.suppress(BufferError):
            self._mapping.close()
        os.close(self.memory_fd)
        os.close(self.emptied_fd)


def create(shape: SegmentShape) -> Segment:
    """A new segment with all its memory. Raises OSError; AttributeError where there is no memfd."""
    memory_fd = sealed_file("handoff-kv", shape.nbytes)
    emptied_fd = -1
    try:
        os.posix_fallocate(memory_fd, 0, shape.nbytes)
        seal(memory_fd)
        emptied_fd = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        return Segment(memory_fd, emptied_fd, shape, writable=True)
    except BaseException:
        os.close(memory_fd)
        if emptied_fd >= 0:
            os.close(emptied_fd)
        raise


def attach(descriptors: list[int], shape: SegmentShape) -> Segment:
    """Map a segment that came over a socket; takes the descriptors, also when it fails. Raises InvalidRequest."""
    try:
        if len(descriptors) != 2:
            raise InvalidRequest("a segment is two descriptors")
        memory_fd, emptied_fd = descriptors
        check_sealed(memory_fd)
        if os.fstat(memory_fd).st_size != shape.nbytes:
            raise InvalidRequest("the segment has not the size that it should have")
        return Segment(memory_fd, emptied_fd, shape, writable=False)
    except InvalidRequest:
        _close(descriptors)
        raise
    except (OSError, ValueError) as exc:
        _close(descriptors)
        raise InvalidRequest("the segment cannot be mapped") from exc


def _close(descriptors: list[int]) -> None:
    for descriptor in descriptors:
        os.close(descriptor)

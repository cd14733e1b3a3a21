"""Parts of a PUT's body as they are read: once begun, each comes without a pause."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from shared.errors import InvalidRequest


@dataclass(slots=True)
class Section:
    """What a sender can send without waiting for anything: length, JSON, a batch of a chunk, or the trailer."""

    num_bytes: int
    taken_bytes: int = 0


# Reads at least one byte of the section into the buffers, in order; returns how many, 0 at the end of the stream.
Receive = Callable[[Sequence[memoryview], Section], int]


def read_section(receive: Receive, num_bytes: int, section: Section | None = None) -> bytearray:
    """So many bytes; of a section of their own if none is given.

    Raises InvalidRequest if the stream ends before, and what `receive` does.
    """
    section = section or Section(num_bytes)
    content = bytearray(num_bytes)
    left = memoryview(content)
    while left:
        taken = receive([left], section)
        if not taken:
            raise InvalidRequest("the blob ended too early")
        section.taken_bytes += taken
        left = left[taken:]
    return content

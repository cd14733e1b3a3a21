"""What the two sides of shared memory say to each other beside what every PUT says.

X-Handoff-Pool: <regions>x<blocks>x<block size>
PUT body: header | blocks | lengths (both `shared.kv.told_chunk`) | trailer
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from shared.errors import InvalidRequest
from shared.kv import told_chunk
from shared.kv.layout import BlobLayout

NAME = "shm"
HEADER = "X-Handoff-Pool"

_MAX_BLOCK_SIZE = 1 << 20
_TERMS = re.compile(r"([1-9][0-9]{0,4})x([1-9][0-9]{0,9})x([1-9][0-9]{0,6})")


@dataclass(frozen=True, slots=True)
class Terms:
    """The head's field: how the pool is divided."""

    num_regions: int
    num_blocks: int
    block_size: int

    def __str__(self) -> str:
        return f"{self.num_regions}x{self.num_blocks}x{self.block_size}"

    @classmethod
    def parse(cls, text: str) -> Terms:
        """Read what `str` wrote. Raises InvalidRequest."""
        match = _TERMS.fullmatch(text)
        if match is None or int(match[3]) > _MAX_BLOCK_SIZE:
            raise InvalidRequest(f"{HEADER} cannot be read")
        return cls(*(int(number) for number in match.groups()))

    def body_bytes(self, header_bytes: int, layout: BlobLayout) -> int:
        """Length of the PUT's body."""
        return header_bytes + told_chunk.body_bytes(layout, self.block_size) + layout.trailer_bytes

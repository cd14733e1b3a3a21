"""Chunks that the receiver reads from the sender's pool by itself: what stands for them in the PUT's body.

    a u32 for each block that holds KV of the PUT, in order
    per chunk: for each batch its length, as u32, once it can be read

The blocks are told with the header, so that nothing but reading is left to do when KV is there. All waiting is a
read of the socket. The batches are those of `shared.kv.pieces.cut` by TOLD_BATCH_BYTES.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from shared.errors import InvalidRequest, ManifestMismatch
from shared.kv.batch import num_batches
from shared.kv.carrier import Body
from shared.kv.encoder import BlobEncoder
from shared.kv.layout import BlobLayout
from shared.kv.manifest import Manifest
from shared.kv.pieces import ChunkBytes
from shared.kv.section import Section, read_section

# Copied or read at once, and then digested: more than goes through the kernel, as each time has its fixed price.
TOLD_BATCH_BYTES = 2 * 1024 * 1024

_WORD = struct.Struct("<I")


def body_bytes(layout: BlobLayout, block_size: int) -> int:
    """How much of a PUT's body stands for its chunks."""
    num_words = _num_blocks(layout.manifest, block_size) + sum(
        num_batches(chunk, len(layout.tensors), layout.row_bytes, TOLD_BATCH_BYTES)
        for chunk in layout.manifest.chunks
    )
    return num_words * _WORD.size


def blocks_message(encoder: BlobEncoder) -> bytes:
    """What to send of the blocks."""
    blocks = encoder.blocks()
    return struct.pack(f"<{len(blocks)}I", *blocks)


def messages(encoder: BlobEncoder, index: int, *, peer_keeps_up: bool) -> Iterator[tuple[bytes, int]]:
    """What to send for a chunk, as soon as it is known, and how many bytes of KV the peer may read then.

    They are digested when the next message is asked for: send each at once. peer_keeps_up: with digesting.
    """
    for batches in encoder.leave_chunk(index, TOLD_BATCH_BYTES, peer_keeps_up=peer_keeps_up):
        lengths = [batch.num_bytes for batch in batches]
        yield struct.pack(f"<{len(lengths)}I", *lengths), sum(lengths)


@dataclass(frozen=True, slots=True)
class ToldBlocks:
    """Where a PUT's KV lies in the peer's pool: blocks of block_size tokens; origin: position of the first one."""

    blocks: Sequence[int]
    block_size: int
    origin: int


def read_blocks(body: Body, manifest: Manifest, block_size: int) -> ToldBlocks:
    """Raises InvalidRequest, and what the body raises."""
    num_blocks = _num_blocks(manifest, block_size)
    words = read_section(body.receive, num_blocks * _WORD.size)
    origin = manifest.from_token // block_size * block_size
    return ToldBlocks(struct.unpack(f"<{num_blocks}I", words), block_size, origin)


class ToldChunk:
    """The receiver's side of a chunk: which of its batches can be read."""

    def __init__(self, body: Body, target: ChunkBytes) -> None:
        self._body = body
        self.batches = list(target.batches(TOLD_BATCH_BYTES))
        self._words = memoryview(bytearray(len(self.batches) * _WORD.size))
        self._num_read = 0
        self._num_told = 0

    def wait(self, position: int) -> None:
        """Until that batch can be read. Raises InvalidRequest, ManifestMismatch, and what the body raises.

        An interrupt is noticed here too, for all batches may have been told at once.
        """
        self._body.stream.check_interrupted()
        section = Section(_WORD.size)
        while position >= self._num_told:
            self._read_some(section)

    def can_tell(self, position: int) -> bool:
        """Whether `wait` would return without waiting, as far as that is known. Raises as `wait` does."""
        if position >= self._num_told and self._body.stream.readable():
            self._read_some(Section(_WORD.size))
        return position < self._num_told

    def _read_some(self, section: Section) -> None:
        """One message may tell of all batches. Raises as `wait` does."""
        taken = self._body.receive([self._words[self._num_read :]], section)
        if not taken:
            raise InvalidRequest("the blob ended too early")
        section.taken_bytes += taken
        self._num_read += taken
        told = self._words[self._num_told * _WORD.size : self._num_read // _WORD.size * _WORD.size]
        for (length,) in _WORD.iter_unpack(told):
            if length != self.batches[self._num_told].num_bytes:
                raise ManifestMismatch("a batch has not the length that the manifest implies")
            self._num_told += 1


def _num_blocks(manifest: Manifest, block_size: int) -> int:
    if not manifest.chunks:
        return 0
    return -(-manifest.num_tokens // block_size) - manifest.from_token // block_size

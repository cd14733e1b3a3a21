"""One chunk of a block pool, whose tensors are copied and digested in one pass where the compiled code can."""

from __future__ import annotations

from typing import Literal

from shared.kv.batch import Batch
from shared.kv.block_views import BlockViews
from shared.kv.copy_rows import Moves, Place, compiled, moves_between
from shared.kv.manifest import Chunk
from shared.kv.pool_memory import address_of

_Way = Literal["from", "in", "out", "digest"]


class OnePass:
    """Each method gives the digests of a batch's tensors, or None if it has done nothing: then it takes two passes.

    Only whole tensors of the chunk, and pieces that the compiled code takes.
    tensor_bytes: of the chunk in one tensor. past_caches: where copies to the pool go.
    """

    def __init__(self, pool: BlockViews, chunk: Chunk, tensor_bytes: int, *, past_caches: bool) -> None:
        self._copy_rows = compiled()
        self._pool = pool
        self._chunk = chunk
        self._tensor_bytes = tensor_bytes
        self._past_caches = past_caches
        self._moves: dict[_Way, Moves | None] = {}

    def look_up(self, peer: BlockViews, origin: int) -> None:
        """Work out what `copy_from` will want, before there is KV. origin: position 0 of `peer` here."""
        if self._copy_rows is not None:
            start, end = self._chunk
            theirs = peer.pieces(start - origin, end - origin)
            self._moves["from"] = moves_between(theirs, self._pool.pieces(start, end))

    def look_up_buffer(self) -> None:
        """The same for `copy_in`."""
        if self._copy_rows is not None:
            self._moves["in"] = self._new_moves("in")

    def copy_from(self, batch: Batch, peer: BlockViews) -> list[int] | None:
        """From the pool that was looked up."""
        source, target = peer.place(batch.first), self._pool.place(batch.first)
        return self._run("from", batch, source, target, store_past=self._past_caches, load_past=True)

    def copy_in(self, batch: Batch, content: memoryview) -> list[int] | None:
        """From a buffer, which lies in the caches."""
        source, target = _buffer(batch, content), self._pool.place(batch.first)
        return self._run("in", batch, source, target, store_past=self._past_caches)

    def copy_out(self, batch: Batch, into: memoryview) -> list[int] | None:
        """To a buffer, which lies in the caches."""
        source, target = self._pool.place(batch.first), _buffer(batch, into)
        return self._run("out", batch, source, target, load_past=True)

    def digest(self, batch: Batch, *, through_caches: bool) -> list[int] | None:
        """Copy nothing. through_caches: leave it there."""
        place = self._pool.place(batch.first)
        return self._run("digest", batch, place, None, load_past=not through_caches)

    def _run(
        self, way: _Way, batch: Batch, source: Place, target: Place | None, **how: bool
    ) -> list[int] | None:
        """how: as the compiled code is told. Moves are worked out once: all batches have the same rows."""
        if self._copy_rows is None or (batch.start, batch.end) != self._chunk:
            return None
        if way not in self._moves:
            self._moves[way] = self._new_moves(way)
        moves = self._moves[way]
        return None if moves is None else self._copy_rows(source, target, batch.num_tensors, moves, **how)

    def _new_moves(self, way: _Way) -> Moves | None:
        """Between the pool and a buffer; of `copy_from` nothing is known that was not looked up."""
        own = self._pool.pieces(*self._chunk)
        buffer = [(0, self._tensor_bytes)]
        source, target = {"in": (buffer, own), "out": (own, buffer), "digest": (own, own)}[way]
        return moves_between(source, target)


def _buffer(batch: Batch, content: memoryview) -> Place:
    return Place(address_of(content), batch.num_tensors, len(content) // batch.num_tensors)

"""Where KV bytes come from and go to: the pool, seen as plain bytes.

`shared.kv.block_views` implements all of it over any flat buffers; staged device memory is another implementation.
`start`, `end` are half-open token positions of the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol, runtime_checkable

from shared.kv.shape import Kind


class KvSource(Protocol):
    """Read side. Called only for positions that the engine has reported as computed."""

    def views(self, layer: int, kind: Kind, start: int, end: int) -> Sequence[memoryview]:
        """Views of format "B" that are, one after the other, the bytes of [end - start, K, D].

        start, end are those of a chunk. The views stay valid and unchanged until the send has ended. Fewer, larger
        views are cheaper.
        """
        ...


class KvSink(Protocol):
    """Write side. The bytes mean nothing until the receive as a whole has succeeded."""

    def views(self, layer: int, kind: Kind, start: int, end: int) -> Sequence[memoryview]:
        """Writable views of format "B" for the bytes of [end - start, K, D], in order.

        Asked for one chunk at a time: never beyond a chunk whose `chunk_filled` is still to come.
        """
        ...

    def chunk_filled(self, start: int, end: int) -> None:
        """Every byte of the chunk is in its views (a staged sink now copies them on). Must not block."""
        ...


@runtime_checkable
class Scattered(Protocol):
    """What a source or sink adds if its views can be many and small: one call copies any range of rows."""

    def is_scattered(self, start: int, end: int) -> bool:
        """Whether copying through one buffer is cheaper than handling each view of this chunk."""
        ...

    def copy_out(self, layer: int, kind: Kind, start: int, end: int, into: memoryview) -> None:
        """Gather the bytes of [end - start, K, D]. start, end may lie anywhere in a chunk."""
        ...

    def copy_in(self, layer: int, kind: Kind, start: int, end: int, content: memoryview) -> None:
        """Scatter the bytes of [end - start, K, D] to where they belong."""
        ...

"""Where KV bytes come from and go to: the pool, seen as plain bytes.

`shared.kv.block_views` implements both over a pool in host memory; staged device memory is another implementation.
`start`, `end` are half-open token positions of the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

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

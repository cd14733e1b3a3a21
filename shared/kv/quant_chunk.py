"""One chunk of KV as it travels quantised: of each K or V tensor the codes, then the scales, then the offsets.

A batch is a number of whole tensors; a limit on the length of quantised chunks keeps one small. Within a tensor a
few groups at a time go through a buffer between pool and quantiser.
"""

from __future__ import annotations

from collections.abc import Iterator

from xxhash import xxh3_64_intdigest

from shared.errors import DigestMismatch
from shared.kv.batch import BATCH_BYTES, Batch
from shared.kv.block_views import BlockViews, one_tensor
from shared.kv.manifest import Chunk
from shared.kv.pool_memory import as_rows
from shared.kv.quant import NotFinite, Quantised
from shared.kv.quant_layout import QuantLayout
from shared.kv.shape import Kind
from shared.kv.source import KvSink, KvSource


class CannotQuantise(Exception):
    """KV has numbers that no code stands for; exact, it can be sent. Within the sender alone."""


class QuantChunk:
    """Reads a source or writes a sink; `digests` of codes, scales and offsets, in file order."""

    def __init__(self, memory: KvSource | KvSink, layout: QuantLayout, chunk: Chunk) -> None:
        self.digests: list[int] = []
        self._memory = memory
        self._chunk = chunk
        self._quantiser = layout.quantiser
        self._row_bytes = layout.row_bytes
        num_tokens = chunk[1] - chunk[0]
        self._tensors = layout.tensors
        self._code_bytes = self._quantiser.code_bytes(num_tokens)
        self._scale_bytes = self._quantiser.scale_bytes(num_tokens)
        self._tensor_bytes = layout.tensor_bytes(num_tokens)
        self._rows = memoryview(bytearray(min(num_tokens, self._quantiser.batch_tokens) * self._row_bytes))
        self._in_pool = memory if isinstance(memory, BlockViews) else None

    def batches(self) -> Iterator[Batch]:
        """All of it, in batches of at least one tensor."""
        step = max(1, BATCH_BYTES // self._tensor_bytes)
        for first in range(0, len(self._tensors), step):
            last = min(first + step, len(self._tensors))
            yield Batch(first, last, *self._chunk, (last - first) * self._tensor_bytes)

    def copy_out(self, batch: Batch, into: memoryview) -> None:
        """Quantise a batch into one buffer of its length, and digest it. Raises CannotQuantise."""
        try:
            for (layer, kind), quantised in self._quantised(batch, into):
                self._quantise(layer, kind, quantised)
                self._digest(quantised)
        except NotFinite as exc:
            raise CannotQuantise(str(exc)) from exc

    def copy_in(self, batch: Batch, content: memoryview) -> None:
        """Digest a batch in one buffer, and dequantise it to where it belongs. Raises DigestMismatch."""
        try:
            for (layer, kind), quantised in self._quantised(batch, content):
                self._digest(quantised)
                self._dequantise(layer, kind, quantised)
        except NotFinite as exc:
            raise DigestMismatch(str(exc)) from exc

    def _digest(self, quantised: Quantised) -> None:
        self.digests += map(xxh3_64_intdigest, (quantised.codes, quantised.scales, quantised.offsets))

    def _quantised(self, batch: Batch, content: memoryview) -> Iterator[tuple[tuple[int, Kind], Quantised]]:
        """Each tensor of the batch, and its parts of the buffer."""
        at = 0
        for tensor in self._tensors[batch.first : batch.last]:
            scales = at + self._code_bytes
            offsets = scales + self._scale_bytes
            end = offsets + self._scale_bytes
            yield tensor, Quantised(content[at:scales], content[scales:offsets], content[offsets:end])
            at = end

    def _quantise(self, layer: int, kind: Kind, into: Quantised) -> None:
        start, end = self._chunk
        if self._in_pool is None:
            views = self._memory.views(layer, kind, start, end)
            self._quantiser.quantise(views[0] if len(views) == 1 else memoryview(b"".join(views)), into)
            return
        for first, last, rows in self._row_ranges():
            self._in_pool.copy_out(one_tensor(layer, kind), first, last, as_rows(rows, 1))
            self._quantiser.quantise(rows, self._quantiser.part(into, first - start, last - start))

    def _dequantise(self, layer: int, kind: Kind, quantised: Quantised) -> None:
        start, end = self._chunk
        if self._in_pool is None:
            at = 0
            rows = memoryview(bytearray((end - start) * self._row_bytes))
            self._quantiser.dequantise(quantised, rows)
            for view in self._memory.views(layer, kind, start, end):
                view[:] = rows[at : at + len(view)]
                at += len(view)
            return
        for first, last, rows in self._row_ranges():
            self._quantiser.dequantise(self._quantiser.part(quantised, first - start, last - start), rows)
            self._in_pool.copy_in(one_tensor(layer, kind), first, last, as_rows(rows, 1))

    def _row_ranges(self) -> Iterator[tuple[int, int, memoryview]]:
        """Half-open positions, and the buffer for their rows."""
        start, end = self._chunk
        step = self._quantiser.batch_tokens
        for first in range(start, end, step):
            last = min(first + step, end)
            yield first, last, self._rows[: (last - first) * self._row_bytes]

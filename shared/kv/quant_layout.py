"""The blob of quantised KV. Each K or V tensor of `shared.kv.layout` becomes three, one after the other:

    NAME          I8 or F8_E4M3   [tokens, K, D]
    NAME.scale    F16             [groups, K, D]
    NAME.offset   F16             [groups, K, D]

The groups of a chunk are counted from its own start; the last one may have fewer tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import cached_property
from itertools import chain

import orjson

from shared.kv.header import METADATA, with_length
from shared.kv.layout import BlobLayout, TensorSpan, part_name
from shared.kv.manifest import QUANTISED_PARTS, Manifest
from shared.kv.quant import Quantiser, num_groups
from shared.kv.shape import WireFormat

_DTYPES: dict[WireFormat, str] = {"int8": "I8", "fp8": "F8_E4M3"}


class QuantLayout(BlobLayout):
    """Where everything lies in the blob of a manifest that names a format."""

    spans_per_tensor = QUANTISED_PARTS

    def __init__(self, manifest: Manifest, kv_wire: WireFormat) -> None:
        self.quantiser = Quantiser(manifest.shape, kv_wire)
        self._dtype = _DTYPES[kv_wire]
        super().__init__(manifest)

    def tensor_bytes(self, num_tokens: int) -> int:
        """One K or V of so many tokens: codes, scales and offsets."""
        return self.quantiser.code_bytes(num_tokens) + 2 * self.quantiser.scale_bytes(num_tokens)

    def wire_bytes(self) -> int:
        """Bytes of K and V as they travel."""
        return sum(self.tensor_bytes(end - start) for start, end in self.manifest.chunks) * len(self.tensors)

    def kv_spans(self) -> Iterator[TensorSpan]:
        """All but the trailer, in file order."""
        return (span for spans in self._spans_by_chunk() for span in spans)

    def _spans_by_chunk(self) -> Iterator[list[TensorSpan]]:
        shape, at = self.manifest.shape, 0
        heads = (shape.num_kv_heads, shape.head_dim)
        for chunk, (start, end) in enumerate(self.manifest.chunks):
            codes, scales = (end - start, *heads), (num_groups(end - start), *heads)
            spans = []
            for layer, kind in self.tensors:
                name = part_name(chunk, layer, kind)
                for suffix, dtype, dims, nbytes in (
                    ("", self._dtype, codes, self.quantiser.code_bytes(end - start)),
                    (".scale", "F16", scales, self.quantiser.scale_bytes(end - start)),
                    (".offset", "F16", scales, self.quantiser.scale_bytes(end - start)),
                ):
                    spans.append(TensorSpan(name + suffix, dtype, dims, at, at + nbytes))
                    at += nbytes
            yield spans

    @cached_property
    def header(self) -> bytes:
        """Everything before the data section. A reader accepts any other JSON that says the same."""
        # Chunk by chunk: as one object it would take ten times the memory of its text.
        entries = (
            orjson.dumps({span.name: span.entry() for span in spans})[1:-1]
            for spans in chain(self._spans_by_chunk(), [self.trailer])
        )
        metadata = orjson.dumps({METADATA: self.metadata()})[:-1]
        return with_length(b",".join((metadata, *entries)) + b"}")


def blob_layout(manifest: Manifest) -> BlobLayout:
    """The layout of exact or quantised KV, as the manifest says."""
    return BlobLayout(manifest) if manifest.kv_wire is None else QuantLayout(manifest, manifest.kv_wire)

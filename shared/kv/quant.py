"""KV in a byte a number, for links slower than memory: int8 or fp8 (e4m3) with scale and offset.

One K or V tensor is [tokens, K, D]. Each channel of each KV head gets a scale and an offset (float16) for every
group of tokens, because keys of many models have a few channels far larger than the others: one scale for a whole
head would spend its 8 bits on them. A number is `offset + scale * code`.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from shared.kv.floats import Float32, from_float32, round_bits, to_float32
from shared.kv.shape import KvShape, WireFormat

GROUP_TOKENS = 32

_NUMBERS_AT_A_TIME = 64 * 1024  # float32 temporaries of a batch stay in a core's cache
_LARGEST: dict[WireFormat, int] = {"int8": 127, "fp8": 448}
# e4m3 has a bias of 7, float32 one of 127: times 2**-120 even the subnormal numbers of both line up.
_E4M3_REBIAS = 120
_E4M3_DROPPED_BITS = 20

Half = np.ndarray[Any, np.dtype[np.float16]]
Codes = np.ndarray[Any, np.dtype[np.uint8]]


class NotFinite(ValueError):
    """KV with NaN, an infinity, or numbers beyond float16: it cannot be quantised, or it never was."""


@dataclass(frozen=True, slots=True)
class Quantised:
    """One quantised tensor, or where it goes: codes [tokens, K, D], scales and offsets [groups, K, D] (float16)."""

    codes: memoryview
    scales: memoryview
    offsets: memoryview


class Quantiser:
    """Quantises and dequantises tensors of one model's KV. Memory beyond its arguments: about a MiB.

    batch_tokens: whole groups, so many that their numbers stay in a core's cache.
    """

    def __init__(self, shape: KvShape, wire: WireFormat) -> None:
        self.wire = wire
        self._dtype = shape.dtype
        self._channels = shape.num_kv_heads * shape.head_dim
        self._row_bytes = shape.row_bytes
        self.batch_tokens = GROUP_TOKENS * max(1, _NUMBERS_AT_A_TIME // (GROUP_TOKENS * self._channels))

    def code_bytes(self, num_tokens: int) -> int:
        """Bytes of the codes of so many tokens."""
        return num_tokens * self._channels

    def scale_bytes(self, num_tokens: int) -> int:
        """Bytes of their scales, and of their offsets."""
        return num_groups(num_tokens) * self._channels * np.dtype(np.float16).itemsize

    def quantise(self, content: memoryview, into: Quantised) -> None:
        """content: [tokens, K, D] in the shape's dtype. Raises NotFinite."""
        for rows, target in self._batches(content, into):
            values = to_float32(rows, self._dtype).reshape(-1, self._channels)
            for group, codes, scales, offsets in self._groups(values, target):
                self._quantise(group, codes, scales, offsets)

    def dequantise(self, quantised: Quantised, into: memoryview) -> None:
        """into: [tokens, K, D] in the shape's dtype. Raises NotFinite."""
        for rows, source in self._batches(into, quantised):
            values = np.empty((len(rows) // self._row_bytes, self._channels), np.float32)
            for group, codes, scales, offsets in self._groups(values, source):
                self._dequantise(codes, scales, offsets, group)
            from_float32(values, self._dtype, rows)

    def _batches(self, rows: memoryview, parts: Quantised) -> Iterator[tuple[memoryview, Quantised]]:
        """All of it; the last batch may have a group that is not full."""
        num_tokens = len(rows) // self._row_bytes
        for start in range(0, num_tokens, self.batch_tokens):
            end = min(start + self.batch_tokens, num_tokens)
            yield rows[start * self._row_bytes : end * self._row_bytes], self.part(parts, start, end)

    def part(self, of: Quantised, start: int, end: int) -> Quantised:
        """Tokens [start, end) of a tensor. start: a multiple of GROUP_TOKENS; end too, or the tensor's."""
        codes = slice(self.code_bytes(start), self.code_bytes(end))
        scales = slice(self.scale_bytes(start), self.scale_bytes(end))
        return Quantised(of.codes[codes], of.scales[scales], of.offsets[scales])

    def _groups(self, values: Float32, parts: Quantised) -> Iterator[tuple[Float32, Codes, Half, Half]]:
        """All full groups at once: [groups, GROUP_TOKENS, channels]; then the rest. Scales have 1 token."""
        codes = np.frombuffer(parts.codes, np.uint8).reshape(-1, self._channels)
        scales = np.frombuffer(parts.scales, np.float16).reshape(-1, 1, self._channels)
        offsets = np.frombuffer(parts.offsets, np.float16).reshape(-1, 1, self._channels)
        full, rest = divmod(len(values), GROUP_TOKENS)
        end = full * GROUP_TOKENS
        dims = (-1, GROUP_TOKENS, self._channels)
        if full:
            yield values[:end].reshape(dims), codes[:end].reshape(dims), scales[:full], offsets[:full]
        if rest:
            yield values[end:][None], codes[end:][None], scales[full:], offsets[full:]

    def _quantise(self, values: Float32, codes: Codes, scales: Half, offsets: Half) -> None:
        low, high = values.min(axis=1, keepdims=True), values.max(axis=1, keepdims=True)
        with np.errstate(over="ignore", invalid="ignore"):
            offsets[:] = low / 2 + high / 2
            centre = offsets.astype(np.float32)
            # From the offset as it travels: what its rounding costs is covered by the scale.
            step = np.maximum(high - centre, centre - low) / _LARGEST[self.wire]
            scales[:] = step
            np.nextafter(scales, np.float16(np.inf), out=scales, where=scales < step)
        if not (np.isfinite(scales).all() and np.isfinite(offsets).all()):
            raise NotFinite("KV has numbers that are not finite, or too large to quantise")
        scale = scales.astype(np.float32)
        inverse = np.divide(1, scale, out=np.zeros_like(scale), where=scale > 0)
        scaled = values - centre
        scaled *= inverse
        if self.wire == "int8":
            np.rint(scaled, out=scaled)
            codes.view(np.int8)[:] = scaled
        else:
            codes[:] = _to_e4m3(scaled)

    def _dequantise(self, codes: Codes, scales: Half, offsets: Half, into: Float32) -> None:
        if not (np.isfinite(scales).all() and np.isfinite(offsets).all()):
            raise NotFinite("a scale or an offset is not finite")
        if self.wire == "int8":
            into[:] = codes.view(np.int8)
        else:
            into[:] = _from_e4m3(codes)
        into *= scales.astype(np.float32)
        into += offsets.astype(np.float32)


def num_groups(num_tokens: int) -> int:
    """Groups of tokens, the last one maybe not full."""
    return -(-num_tokens // GROUP_TOKENS)


def _to_e4m3(values: Float32) -> np.ndarray[Any, np.dtype[np.uint32]]:
    """Codes of numbers in [-448, 448], to nearest even. Overwrites `values`."""
    values *= np.float32(2.0**-_E4M3_REBIAS)
    bits = values.view(np.uint32)
    signs = bits >> 24
    signs &= 0x80
    bits &= 0x7FFFFFFF
    codes = round_bits(bits, _E4M3_DROPPED_BITS)
    codes |= signs
    return codes


def _from_e4m3(codes: Codes) -> Float32:
    """The numbers of the codes, exact. The two codes for NaN, which are never sent, count as 480."""
    bits = codes.astype(np.uint32)
    signs = bits & 0x80
    signs <<= 24
    bits &= 0x7F
    bits <<= _E4M3_DROPPED_BITS
    bits |= signs
    values = bits.view(np.float32)
    values *= np.float32(2.0**_E4M3_REBIAS)
    return values

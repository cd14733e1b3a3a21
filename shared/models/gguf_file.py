"""Reads a GGUF file: metadata, tensor table, and each tensor's numbers as float32.

The package `gguf` has a reader too, but it makes several array objects for each of the 300,000 strings of a
tokenizer and takes 20 s for it; this one takes one. The quantisation formats are gguf's own.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little-endian).
"""

from __future__ import annotations

import mmap
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, GGUFValueType, dequantize
from numpy.typing import NDArray

from shared.models.error import ModelError

MAGIC = b"GGUF"
_VERSIONS = (2, 3)
_PIECE_NUMBERS = 1 << 21
_SCALARS = {
    GGUFValueType.UINT8: "<B",
    GGUFValueType.INT8: "<b",
    GGUFValueType.UINT16: "<H",
    GGUFValueType.INT16: "<h",
    GGUFValueType.UINT32: "<I",
    GGUFValueType.INT32: "<i",
    GGUFValueType.FLOAT32: "<f",
    GGUFValueType.BOOL: "<?",
    GGUFValueType.UINT64: "<Q",
    GGUFValueType.INT64: "<q",
    GGUFValueType.FLOAT64: "<d",
}


@dataclass(frozen=True)
class GgufTensor:
    """A row of the tensor table. shape: outermost first, as numpy and torch have it. offset: in the file."""

    name: str
    shape: tuple[int, ...]
    kind: GGMLQuantizationType
    offset: int
    num_bytes: int


class GgufFile:
    """A memory-mapped GGUF file. metadata: by GGUF's key. tensors: by GGUF's name."""

    def __init__(self, path: Path) -> None:
        """Read everything but the tensor data. Raises ModelError if this is no whole GGUF file."""
        self.path = path
        try:
            with path.open("rb") as stream:
                self._map = mmap.mmap(stream.fileno(), 0, access=mmap.ACCESS_READ)
        except (OSError, ValueError) as exc:  # ValueError: an empty file cannot be mapped
            raise ModelError(f"cannot read {path}: {exc}") from exc
        try:
            self.metadata, self.tensors = _read_tables(_Cursor(self._map))
        except (struct.error, ValueError, KeyError, IndexError) as exc:
            self._map.close()
            raise ModelError(f"{path} is no GGUF file that can be read: {exc}") from exc
        last = max((tensor.offset + tensor.num_bytes for tensor in self.tensors.values()), default=0)
        if last > (size := len(self._map)):
            self._map.close()
            raise ModelError(f"{path} is cut off: {size} bytes of {last}")

    def pieces(self, name: str) -> Iterator[NDArray[np.float32]]:
        """One tensor's numbers in row-major order, dequantised in pieces: they fit the caches, so it is faster.

        Raises ModelError for a quantisation that gguf cannot undo.
        """
        tensor = self.tensors[name]
        per_block, block_bytes = GGML_QUANT_SIZES[tensor.kind]
        raw = np.frombuffer(self._map, np.uint8, tensor.num_bytes, tensor.offset)
        step = _PIECE_NUMBERS // per_block * block_bytes
        for start in range(0, tensor.num_bytes, step):
            try:
                values = dequantize(raw[start : start + step], tensor.kind)
            except NotImplementedError as exc:
                raise ModelError(f"{self.path}: cannot read tensors of the kind {tensor.kind.name}") from exc
            yield np.require(values, np.float32, ["C", "W"])  # the mapped file itself is not writable


class _Cursor:
    """Reads values one after the other; each method moves `at` past what it returns."""

    def __init__(self, buffer: mmap.mmap) -> None:
        self._buffer = buffer
        self.at = 0

    def scalar(self, form: str) -> Any:
        (value,) = struct.unpack_from(form, self._buffer, self.at)
        self.at += struct.calcsize(form)
        return value

    def text(self) -> str:
        length = self.scalar("<Q")
        end = self.at + length
        if end > len(self._buffer):
            raise ValueError("a string runs past the end")
        value = self._buffer[self.at : end].decode()
        self.at = end
        return value

    def value(self, kind: GGUFValueType) -> Any:
        if kind is GGUFValueType.STRING:
            return self.text()
        if kind is GGUFValueType.ARRAY:
            inner, length = GGUFValueType(self.scalar("<I")), self.scalar("<Q")
            return [self.value(inner) for _ in range(length)]
        return self.scalar(_SCALARS[kind])


def _read_tables(cursor: _Cursor) -> tuple[dict[str, Any], dict[str, GgufTensor]]:
    magic, version = struct.pack("<I", cursor.scalar("<I")), cursor.scalar("<I")
    if magic != MAGIC or version not in _VERSIONS:
        raise ValueError("it does not begin like one" if magic != MAGIC else f"version {version}")
    num_tensors, num_values = cursor.scalar("<Q"), cursor.scalar("<Q")
    metadata = {}
    for _ in range(num_values):
        key = cursor.text()
        metadata[key] = cursor.value(GGUFValueType(cursor.scalar("<I")))
    rows = []
    for _ in range(num_tensors):
        name = cursor.text()
        reversed_shape = [cursor.scalar("<Q") for _ in range(cursor.scalar("<I"))]
        kind = GGMLQuantizationType(cursor.scalar("<I"))
        rows.append((name, tuple(reversed(reversed_shape)), kind, cursor.scalar("<Q")))
    alignment = metadata.get("general.alignment", 32)
    start = -(-cursor.at // alignment) * alignment
    tensors = {}
    for name, shape, kind, offset in rows:
        per_block, block_bytes = GGML_QUANT_SIZES[kind]
        num_bytes = prod(shape) // per_block * block_bytes
        tensors[name] = GgufTensor(name, shape, kind, start + offset, num_bytes)
    return metadata, tensors

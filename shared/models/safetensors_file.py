"""Safetensors files without a tensor library: read the header, or write one tensor after the other.

The reference writer wants all tensors in memory at once; this one needs one piece of one tensor.
Format: https://huggingface.co/docs/safetensors/index#format
"""

from __future__ import annotations

import json
import struct
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from shared.models.error import ModelError

_ITEM_BYTES = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_ITEM_BYTES |= {"I64": 8, "I32": 4, "I16": 2, "I8": 1, "U64": 8, "U32": 4, "U16": 2, "U8": 1, "BOOL": 1}
DTYPE_NAMES = {"float32": "F32", "float16": "F16", "bfloat16": "BF16"}

_HEADER_ALIGNMENT = 64  # so that the tensors' bytes begin on a cache line of the mapped file
_LENGTH = struct.Struct("<Q")


@dataclass(frozen=True)
class TensorSpec:
    """Name, safetensors dtype (F32, BF16, ...) and shape of a tensor."""

    name: str
    dtype: str
    shape: tuple[int, ...]

    @property
    def num_bytes(self) -> int:
        """Size of the tensor's data."""
        return prod(self.shape) * _ITEM_BYTES[self.dtype]


def read_specs(path: Path) -> list[TensorSpec]:
    """The tensors that a file declares. Raises ModelError if it is no safetensors file or cut off."""
    try:
        with path.open("rb") as stream:
            (length,) = _LENGTH.unpack(stream.read(_LENGTH.size))
            header = json.loads(stream.read(length))
        rows = {name: row for name, row in header.items() if name != "__metadata__"}
        specs = [TensorSpec(name, row["dtype"], tuple(row["shape"])) for name, row in rows.items()]
        end = _LENGTH.size + length + max((row["data_offsets"][1] for row in rows.values()), default=0)
    except (OSError, ValueError, struct.error, KeyError, TypeError, AttributeError, OverflowError) as exc:
        raise ModelError(f"cannot read {path}: {exc}") from exc
    if end != (size := path.stat().st_size):
        raise ModelError(f"{path} is damaged: it has {size} bytes and declares {end}")
    return specs


def tensor_bytes(path: Path) -> Iterator[NDArray[np.uint8]]:
    """The bytes of each tensor of a file, mapped and not copied, in the order of `read_specs`."""
    mapped = np.memmap(path, np.uint8, "r")
    (length,) = _LENGTH.unpack(mapped[: _LENGTH.size].tobytes())
    start = _LENGTH.size + length
    header = json.loads(mapped[_LENGTH.size : start].tobytes())
    for name, row in header.items():
        if name != "__metadata__":
            yield mapped[slice(*(start + offset for offset in row["data_offsets"]))]


def write_tensors(path: Path, specs: list[TensorSpec], data: Iterable[memoryview | bytes]) -> None:
    """Write a file whose tensors are `specs` and whose bytes are the pieces of `data`, in that order.

    Raises ModelError if the pieces do not add up.
    """
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for spec in specs:
        start, end = end, end + spec.num_bytes
        header[spec.name] = {"dtype": spec.dtype, "shape": list(spec.shape), "data_offsets": [start, end]}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-(len(text) + _LENGTH.size) % _HEADER_ALIGNMENT)
    with path.open("wb") as out:
        out.write(_LENGTH.pack(len(text)) + text)
        written = sum(out.write(piece) for piece in data)
    if written != end:
        raise ModelError(f"the tensors for {path.name} have {written} bytes, not {end}")

"""Numbers of a KV tensor as float32 and back, for numpy, which has no bfloat16."""

from __future__ import annotations

from typing import Any

import numpy as np

from shared.kv.shape import KvDtype

Float32 = np.ndarray[Any, np.dtype[np.float32]]
UInt32 = np.ndarray[Any, np.dtype[np.uint32]]

_HALF_MAX = float(np.finfo(np.float16).max)


def to_float32(content: memoryview, dtype: KvDtype) -> Float32:
    """The numbers of these bytes, flat and exact; a view of them if they are float32 already."""
    if dtype == "F32":
        return np.frombuffer(content, np.float32)
    if dtype == "F16":
        return np.frombuffer(content, np.float16).astype(np.float32)
    bits = np.frombuffer(content, np.uint16).astype(np.uint32)
    bits <<= 16
    return bits.view(np.float32)


def from_float32(values: Float32, dtype: KvDtype, into: memoryview) -> None:
    """Write finite numbers in `dtype`, to nearest even; float16 has its largest number for larger ones.

    Overwrites `values`.
    """
    flat = values.reshape(-1)
    if dtype == "F32":
        np.frombuffer(into, np.float32)[:] = flat
    elif dtype == "F16":
        np.clip(flat, -_HALF_MAX, _HALF_MAX, out=flat)
        np.frombuffer(into, np.float16)[:] = flat
    else:
        np.frombuffer(into, np.uint16)[:] = round_bits(flat.view(np.uint32), 16)


def round_bits(bits: UInt32, dropped: int) -> UInt32:
    """Bits of finite floats without the last `dropped` of them, rounded to nearest even. Overwrites `bits`."""
    odd = bits >> dropped
    odd &= 1
    bits += odd
    bits += (1 << (dropped - 1)) - 1
    bits >>= dropped
    return bits

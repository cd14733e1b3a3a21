"""Number formats of weights as bytes, without a tensor library: any float format to float32, float32 to the served.

numpy has no bfloat16: it is the upper half of a float32, rounded to nearest even as gguf does it.
"""

from __future__ import annotations

from typing import Any

import numpy as np
from gguf import GGMLQuantizationType, dequantize, quantize
from numpy.typing import NDArray

FLOATS = frozenset({"F64", "F32", "F16", "BF16"})


def to_float32(raw: NDArray[np.uint8], dtype: str) -> NDArray[np.float32]:
    """The numbers in `raw`, which are in the safetensors format `dtype`."""
    if dtype == "BF16":
        values: NDArray[np.float32] = dequantize(raw, GGMLQuantizationType.BF16)
        return values
    stored: NDArray[Any] = raw.view({"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype])
    return stored.astype(np.float32, copy=False)


def from_float32(values: NDArray[np.float32], dtype: str) -> memoryview:
    """The bytes of `values` in the safetensors format `dtype`; what is too large for it becomes infinite."""
    if dtype == "BF16":
        return _bytes(quantize(values.reshape(-1), GGMLQuantizationType.BF16))
    with np.errstate(over="ignore"):
        return _bytes(values.astype({"F32": "<f4", "F16": "<f2"}[dtype], copy=False))


def _bytes(values: NDArray[Any]) -> memoryview:
    return np.ascontiguousarray(values).reshape(-1).view(np.uint8).data

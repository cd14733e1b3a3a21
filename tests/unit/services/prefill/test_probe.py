"""Made-up KV for measuring."""

from __future__ import annotations

from typing import get_args

import numpy as np
import pytest

from services.prefill.probe import made_up_rows
from shared.kv.floats import to_float32
from shared.kv.quant import Quantised, Quantiser
from shared.kv.shape import WIRE_FORMATS, KvDtype, KvShape, WireFormat


@pytest.mark.parametrize("dtype", get_args(KvDtype))
@pytest.mark.parametrize("wire", WIRE_FORMATS)
def test_made_up_kv_can_be_quantised(dtype: KvDtype, wire: WireFormat) -> None:
    """It used to be random bytes: some of those are NaN, and KV with NaN travels exact whatever is agreed."""
    shape = KvShape(num_layers=1, num_kv_heads=2, head_dim=8, dtype=dtype)
    rows = made_up_rows(shape, 100)
    quantiser = Quantiser(shape, wire)
    sizes = quantiser.code_bytes(100), quantiser.scale_bytes(100), quantiser.scale_bytes(100)

    quantiser.quantise(rows, Quantised(*(memoryview(bytearray(size)) for size in sizes)))

    assert 100 * shape.row_bytes == len(rows)
    values = to_float32(rows, dtype)
    assert np.isfinite(values).all()
    assert len(np.unique(values)) > 100

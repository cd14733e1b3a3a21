"""Quantised KV: how far a number can be off, what is exact, and what is refused."""

from __future__ import annotations

import math
import tracemalloc

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.kv.floats import Float32, from_float32, to_float32
from shared.kv.quant import GROUP_TOKENS, NotFinite, Quantised, Quantiser, num_groups
from shared.kv.shape import ITEMSIZE_BYTES, WIRE_FORMATS, KvDtype, KvShape, WireFormat

TORCH_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16}
# Half a unit of the last place of each dtype, relative; float32 arithmetic on the way costs a few of its own.
ROUNDING = {"F32": 2.0**-22, "BF16": 2.0**-8, "F16": 2.0**-10}


def as_bytes(values: Float32, dtype: KvDtype) -> memoryview:
    """The numbers as a pool has them."""
    content = torch.from_numpy(values).to(TORCH_DTYPES[dtype]).contiguous()
    return memoryview(bytearray(content.view(torch.uint8).numpy().tobytes()))


def empty(quantiser: Quantiser, num_tokens: int) -> Quantised:
    """Room for one tensor."""
    codes, scales = quantiser.code_bytes(num_tokens), quantiser.scale_bytes(num_tokens)
    return Quantised(*(memoryview(bytearray(size)) for size in (codes, scales, scales)))


def there_and_back(content: memoryview, shape: KvShape, wire: WireFormat) -> tuple[Quantised, memoryview]:
    """What travels, and what comes out."""
    quantiser = Quantiser(shape, wire)
    quantised = empty(quantiser, len(content) // shape.row_bytes)
    quantiser.quantise(content, quantised)
    result = memoryview(bytearray(len(content)))
    quantiser.dequantise(quantised, result)
    return quantised, result


@settings(max_examples=80, deadline=None)
@given(
    dtype=st.sampled_from(list(ITEMSIZE_BYTES)),
    wire=st.sampled_from(WIRE_FORMATS),
    num_tokens=st.integers(1, 3 * GROUP_TOKENS),
    num_heads=st.integers(1, 3),
    exponent=st.integers(-6, 4),
    seed=st.integers(0, 2**32 - 1),
)
def test_no_number_is_further_off_than_stated(
    dtype: KvDtype, wire: WireFormat, num_tokens: int, num_heads: int, exponent: int, seed: int
) -> None:
    """int8: half a scale. fp8: a sixteenth of the distance to the offset. Plus what the dtype itself rounds."""
    shape = KvShape(1, num_heads, 4, dtype)
    rng = np.random.default_rng(seed)
    dims = (num_tokens, num_heads * 4)
    spread = np.exp(rng.normal(0, 3, dims[1])).astype(np.float32)  # some channels far larger than others
    values = ((rng.standard_normal(dims) + rng.normal(0, 3, dims[1])) * spread * 10.0**exponent).clip(
        -6e4, 6e4
    )
    content = as_bytes(values.astype(np.float32), dtype)

    quantised, result = there_and_back(content, shape, wire)

    sent = to_float32(content, dtype).reshape(dims).astype(np.float64)
    came = to_float32(result, dtype).reshape(dims)
    scales, offsets = (
        np.frombuffer(part, np.float16)
        .astype(np.float64)
        .reshape(-1, dims[1])
        .repeat(GROUP_TOKENS, 0)[:num_tokens]
        for part in (quantised.scales, quantised.offsets)
    )
    off = scales / 2 if wire == "int8" else np.maximum(np.abs(sent - offsets) / 16, scales / 1024)
    allowed = off * 1.001 + ROUNDING[dtype] * (np.abs(sent) + np.abs(offsets) + off) + 2.0**-24
    assert (np.abs(came - sent) <= allowed).all()


@settings(max_examples=40, deadline=None)
@given(wire=st.sampled_from(WIRE_FORMATS), seed=st.integers(0, 2**32 - 1))
def test_scales_are_as_fine_as_the_numbers_allow(wire: WireFormat, seed: int) -> None:
    """A channel's scale covers its own range in its own group of tokens and little more."""
    rng = np.random.default_rng(seed)
    values = rng.standard_normal((2 * GROUP_TOKENS, 4)).astype(np.float32) * np.array(
        [1, 10, 100, 1000], np.float32
    )
    quantised, _ = there_and_back(as_bytes(values, "F32"), KvShape(1, 1, 4, "F32"), wire)

    scales = np.frombuffer(quantised.scales, np.float16).reshape(2, 4).astype(np.float32)
    ranges = np.ptp(values.reshape(2, GROUP_TOKENS, 4), axis=1)
    steps = {"int8": 2 * 127, "fp8": 2 * 448}[wire]
    assert (scales * steps >= ranges * 0.999).all()
    assert (scales * steps <= ranges * 1.01).all()


@pytest.mark.parametrize("wire", WIRE_FORMATS)
@pytest.mark.parametrize("dtype", list(ITEMSIZE_BYTES))
def test_equal_numbers_are_exact(dtype: KvDtype, wire: WireFormat) -> None:
    """Zeros, and a channel that has one float16 number throughout, come back as they were."""
    values = np.zeros((GROUP_TOKENS + 5, 4), np.float32)
    values[:, 1], values[:, 2] = -1.5, 96.0
    content = as_bytes(values, dtype)

    _, result = there_and_back(content, KvShape(1, 1, 4, dtype), wire)

    assert bytes(content) == bytes(result)


@pytest.mark.parametrize("wire", WIRE_FORMATS)
@pytest.mark.parametrize("dtype", list(ITEMSIZE_BYTES))
@pytest.mark.parametrize("number", [math.nan, math.inf, -math.inf])
def test_what_is_not_finite_is_refused(dtype: KvDtype, wire: WireFormat, number: float) -> None:
    """NaN and infinities cannot be quantised, wherever they are."""
    for row in (0, GROUP_TOKENS, GROUP_TOKENS + 2):
        values = np.ones((GROUP_TOKENS + 3, 4), np.float32)
        values[row, 3] = number
        with pytest.raises(NotFinite):
            there_and_back(as_bytes(values, dtype), KvShape(1, 1, 4, dtype), wire)


def test_numbers_beyond_float16_are_refused() -> None:
    """Scales and offsets are float16: what they cannot say is an error, not an infinity at the other end."""
    values = np.full((2, 2), 1e30, np.float32)
    with pytest.raises(NotFinite):
        there_and_back(as_bytes(values, "F32"), KvShape(1, 1, 2, "F32"), "int8")


@pytest.mark.parametrize("part", ["scales", "offsets"])
def test_scales_that_are_not_finite_are_refused(part: str) -> None:
    """A peer cannot put an infinity or NaN into the pool."""
    shape = KvShape(1, 1, 4, "F32")
    quantiser = Quantiser(shape, "int8")
    quantised = empty(quantiser, 3)
    np.frombuffer(getattr(quantised, part), np.float16)[1] = np.nan
    with pytest.raises(NotFinite):
        quantiser.dequantise(quantised, memoryview(bytearray(3 * shape.row_bytes)))


def test_largest_halves_stay_finite() -> None:
    """Rounding up the largest float16 gives the largest float16."""
    values = np.array([[65504, -65504], [65000, 65504], [0, 65504]], np.float32)
    _, result = there_and_back(as_bytes(values, "F16"), KvShape(1, 1, 2, "F16"), "int8")
    assert np.isfinite(to_float32(result, "F16")).all()


def test_fp8_codes_are_those_of_torch() -> None:
    """e4m3 to nearest even, subnormal numbers included; any reader of F8_E4M3 finds what we mean."""
    rng = np.random.default_rng(0)
    values = np.concatenate([
        rng.uniform(-448, 448, 500),
        rng.uniform(-0.03, 0.03, 500),
        torch.arange(256, dtype=torch.uint8).view(torch.float8_e4m3fn).float().nan_to_num().numpy(),
        [448, -448],
    ]).astype(np.float32)  # fmt: skip
    # One token: each number is a channel, so put its range into a second and third one.
    column = np.stack([values, np.full_like(values, 448), np.full_like(values, -448)])
    quantised, _ = there_and_back(as_bytes(column, "F32"), KvShape(1, 1, values.size, "F32"), "fp8")

    codes = np.frombuffer(quantised.codes, np.uint8).reshape(column.shape)
    assert {1.0} == set(np.frombuffer(quantised.scales, np.float16).tolist())
    assert torch.from_numpy(values).to(torch.float8_e4m3fn).view(torch.uint8).tolist() == codes[0].tolist()
    as_read = torch.from_numpy(codes[0].copy()).view(torch.float8_e4m3fn).float()
    quantiser = Quantiser(KvShape(1, 1, values.size, "F32"), "fp8")
    result = memoryview(bytearray(column.nbytes))
    quantiser.dequantise(quantised, result)
    assert as_read.tolist() == to_float32(result, "F32")[: values.size].tolist()


@settings(max_examples=60, deadline=None)
@given(dtype=st.sampled_from(list(ITEMSIZE_BYTES)), bits=st.lists(st.integers(0, 2**32 - 1), min_size=1))
def test_numbers_are_rounded_as_torch_rounds(dtype: KvDtype, bits: list[int]) -> None:
    """Every finite float32 becomes the same bfloat16, and the same float16 if it has one, as in torch."""
    values = np.array(bits, np.uint32).view(np.float32)
    values = np.append(
        values[np.isfinite(values) & (np.abs(values) < (6e4 if dtype == "F16" else 3e38))], [0]
    )
    values = values.astype(np.float32)
    result = memoryview(bytearray(values.size * ITEMSIZE_BYTES[dtype]))
    from_float32(values.copy(), dtype, result)
    assert bytes(as_bytes(values, dtype)) == bytes(result)


@pytest.mark.parametrize(("num_tokens", "groups"), [(0, 0), (1, 1), (GROUP_TOKENS, 1), (GROUP_TOKENS + 1, 2)])
def test_sizes(num_tokens: int, groups: int) -> None:
    """A byte a number, and four for each channel and group."""
    quantiser = Quantiser(KvShape(1, 2, 64, "BF16"), "int8")
    assert groups == num_groups(num_tokens)
    assert num_tokens * 128 == quantiser.code_bytes(num_tokens)
    assert groups * 256 == quantiser.scale_bytes(num_tokens)


@pytest.mark.parametrize("wire", WIRE_FORMATS)
def test_memory_is_bounded(wire: WireFormat) -> None:
    """A long tensor needs no more memory on the way than a short one."""
    shape = KvShape(1, 8, 128, "BF16")
    content = memoryview(bytearray(4096 * shape.row_bytes))
    quantiser = Quantiser(shape, wire)
    quantised = empty(quantiser, 4096)
    tracemalloc.start()
    quantiser.quantise(content, quantised)
    quantiser.dequantise(quantised, content)
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert peak < 2 << 20

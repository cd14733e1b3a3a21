"""`handoff kv` on a blob of quantised KV."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli.main import app
from shared.kv.shape import KvShape
from tests.unit.shared.kv.blobs import encode, expected, manifest_for, pool_of_numbers

SHAPE = KvShape(2, 2, 4, "F32")
WANT = replace(expected(num_tokens=40, shape=SHAPE), kv_wire="int8")


@pytest.fixture
def blob(tmp_path: Path) -> Path:
    """A sound blob's file: one chunk, whose tensors have two groups of tokens."""
    path = tmp_path / "quantised.safetensors"
    path.write_bytes(encode(manifest_for(WANT, chunk_size=0).quantised("int8"), pool_of_numbers(SHAPE, 40)))
    return path


def test_inspect_says_how_kv_is_quantised(blob: Path) -> None:
    """The format, the bytes on the wire beside those of the pool; codes, scales and offsets are all checked."""
    result = CliRunner().invoke(app, ["kv", "inspect", str(blob)])
    assert 0 == result.exit_code, result.output
    assert "int8, 1,536 bytes, 30% of that" in result.output
    assert "12 ok" in result.output
    assert "sound: every digest is right" in result.output


def test_inspect_as_json(blob: Path) -> None:
    """Every tensor with its dtype and shape."""
    result = CliRunner().invoke(app, ["kv", "inspect", "--json", str(blob)])
    told = json.loads(result.output)
    assert ("int8", 5120, 1536) == (told["manifest"]["kv_wire"], told["kv_bytes"], told["kv_wire_bytes"])
    tensors = {tensor["name"]: (tensor["dtype"], tensor["shape"]) for tensor in told["tensors"]}
    assert ("I8", [40, 2, 4]) == tensors["chunk.0000.layer.01.k"]
    assert (
        ("F16", [2, 2, 4])
        == tensors["chunk.0000.layer.01.k.scale"]
        == tensors["chunk.0000.layer.01.k.offset"]
    )


def test_verify_finds_a_damaged_scale(blob: Path) -> None:
    """Its tensor is named."""
    content = bytearray(blob.read_bytes())
    content[-8 * 15 - 9 - 1] ^= 1
    blob.write_bytes(content)
    result = CliRunner().invoke(app, ["kv", "verify", str(blob)])
    assert 1 == result.exit_code
    assert "chunk.0000.layer.01.v.offset is damaged" in result.output

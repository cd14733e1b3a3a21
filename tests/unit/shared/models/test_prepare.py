"""From any model to a folder in the serving dtype: in place, converted once, or one clear line."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file, save_file

from shared.models.catalog import cached_models
from shared.models.convert import convert
from shared.models.error import ModelError
from shared.models.files import weight_files
from shared.models.prepare import ensure_checkpoint, ensure_tokenizer, find_checkpoint, model_name
from shared.models.safetensors_file import TensorSpec, read_specs, write_tensors
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_model import build_tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny float32 checkpoint."""
    return build_tiny_model(tmp_path / "tiny")


def test_a_checkpoint_in_the_serving_dtype_is_used_in_place(tmp_path: Path, folder: Path) -> None:
    """Nothing is copied and no cache is made."""
    assert folder == ensure_checkpoint(str(folder), "float32", tmp_path / "cache", print)
    assert folder == ensure_tokenizer(str(folder), tmp_path / "cache", print)
    assert folder == find_checkpoint(str(folder), "float32", tmp_path / "cache")
    assert "tiny" == model_name(folder)
    assert not (tmp_path / "cache").exists()


def test_another_dtype_is_converted_once(tmp_path: Path, folder: Path) -> None:
    """A whole checkpoint in the other dtype is made, named after its source, and found again."""
    cache = tmp_path / "cache"
    assert find_checkpoint(str(folder), "bfloat16", cache) is None
    made = ensure_checkpoint(str(folder), "bfloat16", cache, print)
    expected, actual = (load_file(f / "model.safetensors") for f in (folder, made))
    assert expected.keys() == actual.keys()
    assert all(torch.equal(tensor.to(torch.bfloat16), actual[name]) for name, tensor in expected.items())
    config = json.loads((made / "config.json").read_text())
    assert ("bfloat16", False) == (config["dtype"], "torch_dtype" in config)
    told: list[str] = []
    assert made == ensure_checkpoint(str(folder), "bfloat16", cache, told.append)
    assert made == find_checkpoint(str(folder), "bfloat16", cache)
    assert made == ensure_checkpoint(str(made), "bfloat16", cache, told.append)
    assert [] == told
    assert "tiny" == model_name(made)
    assert [("tiny", "bfloat16", made)] == [(e.name, e.kind, e.path) for e in cached_models(cache)]


def test_a_changed_source_is_converted_again(tmp_path: Path, folder: Path) -> None:
    """New weights under the old path never meet the old conversion."""
    os.utime(folder / "model.safetensors", ns=(1, 1))
    cache = tmp_path / "cache"
    first = ensure_checkpoint(str(folder), "float16", cache, print)
    build_tiny_model(folder, seed=1)
    assert find_checkpoint(str(folder), "float16", cache) is None
    assert first.is_dir()


def test_a_gguf_file_becomes_a_checkpoint(tmp_path: Path, folder: Path) -> None:
    """The worker's and the router's folder of one GGUF file have the same tokenizer and the same name."""
    path = write_gguf(folder, tmp_path / "model-q.gguf")
    worker = ensure_checkpoint(str(path), "float32", tmp_path / "cache", print)
    router = ensure_tokenizer(str(path), tmp_path / "cache", print)
    assert {"model-q"} == {model_name(worker), model_name(router)}
    assert (worker / "tokenizer.json").read_bytes() == (router / "tokenizer.json").read_bytes()
    assert not (router / "model.safetensors").exists()
    assert ["float32", "tokenizer"] == [entry.kind for entry in cached_models(tmp_path / "cache")]


def test_a_failed_conversion_is_one_clear_line_and_leaves_nothing(tmp_path: Path, folder: Path) -> None:
    """The reason comes from the converting process; no entry and no partial one stays."""
    path = write_gguf(folder, tmp_path / "x.gguf", architecture="llama")
    with pytest.raises(ModelError, match=r"^cannot convert x\.gguf: [^\n]*architecture llama, not qwen2$"):
        ensure_checkpoint(str(path), "float32", tmp_path / "cache", print)
    assert [] == list((tmp_path / "cache/checkpoints").iterdir())


def test_the_converting_process_ends_with_its_parent(tmp_path: Path, folder: Path) -> None:
    """When its stdin closes, which the death of the parent does, a conversion does not go on alone."""
    os.mkfifo(tmp_path / "x.gguf")  # opening it blocks until someone writes
    command = [sys.executable, "-m", "shared.models.convert"]
    command += [str(tmp_path / "x.gguf"), str(tmp_path / "out"), "float32"]
    with subprocess.Popen(command, stdin=subprocess.PIPE) as process:
        process.communicate(timeout=60)
    assert 1 == process.returncode


def test_other_dtypes_and_quantised_checkpoints_are_refused(tmp_path: Path, folder: Path) -> None:
    """What cannot be served is said before any work."""
    with pytest.raises(ModelError, match="cannot serve in int8"):
        ensure_checkpoint(str(folder), "int8", tmp_path / "cache", print)
    config = json.loads((folder / "config.json").read_text()) | {
        "quantization_config": {"quant_method": "awq"}
    }
    (folder / "config.json").write_text(json.dumps(config))
    with pytest.raises(ModelError, match="is a quantised checkpoint"):
        ensure_checkpoint(str(folder), "float32", tmp_path / "cache", print)


@pytest.mark.parametrize("keep", [0, 7, 100, -1])
def test_cut_off_weights_are_refused(tmp_path: Path, folder: Path, keep: int) -> None:
    """A half-downloaded safetensors file is one clear line, not a crash in a worker."""
    path = folder / "model.safetensors"
    path.write_bytes(path.read_bytes()[:keep])
    with pytest.raises(ModelError, match=r"model\.safetensors"):
        ensure_checkpoint(str(folder), "float32", tmp_path / "cache", print)


def test_written_tensors_are_read_by_the_reference_reader(tmp_path: Path) -> None:
    """Our streaming writer makes files that safetensors opens, data aligned to 64 bytes, empty tensors too."""
    specs = [TensorSpec("b", "F32", (2, 3)), TensorSpec("a", "I64", (0,)), TensorSpec("c", "BF16", ())]
    numbers = torch.arange(6, dtype=torch.float32)
    write_tensors(
        tmp_path / "x", specs, [numbers[:2].numpy().tobytes(), numbers[2:].numpy().tobytes(), b"\0\x40"]
    )
    tensors = load_file(tmp_path / "x")
    assert torch.equal(numbers.reshape(2, 3), tensors["b"])
    assert (0,) == tensors["a"].shape
    assert 2.0 == tensors["c"].item()
    assert specs == read_specs(tmp_path / "x")
    assert 0 == (8 + int.from_bytes((tmp_path / "x").read_bytes()[:8], "little")) % 64


def test_tensors_that_do_not_add_up_are_an_error(tmp_path: Path) -> None:
    """A writer that is given too few bytes says so."""
    with pytest.raises(ModelError, match="have 4 bytes, not 8"):
        write_tensors(tmp_path / "x", [TensorSpec("a", "F32", (2,))], [b"1234"])


@pytest.mark.parametrize("stored", [torch.float64, torch.float32, torch.float16, torch.bfloat16])
@pytest.mark.parametrize("served", ["float32", "float16", "bfloat16"])
def test_numbers_are_rounded_as_torch_rounds_them(tmp_path: Path, stored: torch.dtype, served: str) -> None:
    """From every stored format to every served one the bits are torch's, infinities and ties included."""
    edges = [0.0, -0.0, 1.0, 65504.0, 65520.0, 1e30, 6e-8, 1e-45, float("inf"), 1.00390625, 1.01171875]
    numbers = torch.cat([torch.tensor(edges), torch.randn(5000, generator=torch.Generator().manual_seed(0))])
    numbers = numbers.to(stored)
    build_tiny_model(tmp_path / "in")
    save_file({"b": numbers, "a": torch.arange(3)}, tmp_path / "in/model.safetensors")
    convert(tmp_path / "in", tmp_path / "out", served, print)
    actual = load_file(tmp_path / "out/model.safetensors")
    expected = numbers.float().to(getattr(torch, served))
    assert torch.equal(expected.view(torch.uint8), actual["b"].view(torch.uint8))
    assert [0, 1, 2] == actual["a"].tolist()


def test_several_weight_files_become_one(tmp_path: Path, folder: Path) -> None:
    """A sharded checkpoint converts to a single file with all tensors."""
    tensors = read_specs(folder / "model.safetensors")
    (folder / "model.safetensors").rename(folder / "model-00001-of-00001.safetensors")
    index = {"weight_map": {spec.name: "model-00001-of-00001.safetensors" for spec in tensors}}
    (folder / "model.safetensors.index.json").write_text(json.dumps(index))
    convert(folder, tmp_path / "out", "float16", print)
    assert ["model.safetensors"] == [path.name for path in weight_files(tmp_path / "out")]
    assert {spec.name for spec in tensors} == {
        spec.name for spec in read_specs(tmp_path / "out/model.safetensors")
    }

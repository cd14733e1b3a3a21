"""A GGUF file becomes the checkpoint it was made from."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType, GGUFReader, dequantize
from safetensors.torch import load_file
from tokenizers import Tokenizer
from transformers import AutoTokenizer

from shared.models.convert import convert
from shared.models.error import ModelError
from shared.models.gguf_checkpoint import write_small_files
from shared.models.gguf_file import GgufFile
from tests.support.tiny_gguf import write_gguf
from tests.support.tiny_model import build_tiny_model

_TEXTS = (
    "The capital of France",
    "Größe 1234",
    "你好 😀",
    "<|im_start|>user\nhi<|im_end|>\n<tool_call>",
    "a\r\n\n b",
)


@pytest.fixture
def checkpoint(tmp_path: Path) -> Path:
    """A tiny checkpoint whose widths are multiples of the 32 numbers that GGUF quantises together."""
    return build_tiny_model(tmp_path / "checkpoint")


@pytest.mark.parametrize("tied", [True, False])
def test_a_float32_file_gives_back_every_weight_bit(tmp_path: Path, tied: bool) -> None:
    """Names, shapes and bits of all tensors survive the way into GGUF and back, tied or not."""
    checkpoint = build_tiny_model(tmp_path / "checkpoint", tie_word_embeddings=tied)
    convert(write_gguf(checkpoint, tmp_path / "x.gguf"), tmp_path / "out", "float32", print)
    expected, actual = (load_file(folder / "model.safetensors") for folder in (checkpoint, tmp_path / "out"))
    assert expected.keys() == actual.keys()
    assert all(torch.equal(tensor, actual[name]) for name, tensor in expected.items())
    assert tied == json.loads((tmp_path / "out/config.json").read_text())["tie_word_embeddings"]


@pytest.mark.parametrize("kind", ["F16", "BF16", "Q4_0", "Q5_0", "Q8_0"])
def test_quantised_weights_are_what_gguf_says(tmp_path: Path, checkpoint: Path, kind: str) -> None:
    """Dequantised in pieces from the mapped file, each tensor has the bits that gguf's own reader gives."""
    path = write_gguf(checkpoint, tmp_path / "x.gguf", GGMLQuantizationType[kind])
    source = GgufFile(path)
    reader = GGUFReader(path)
    assert [tensor.name for tensor in reader.tensors] == list(source.tensors)
    for tensor in reader.tensors:
        expected = dequantize(tensor.data, tensor.tensor_type).astype(np.float32)
        actual = np.concatenate(list(source.pieces(tensor.name)))
        assert expected.shape == source.tensors[tensor.name].shape
        assert expected.tobytes() == actual.tobytes()


def test_config_and_end_tokens_are_the_checkpoint_s(tmp_path: Path, checkpoint: Path) -> None:
    """Every architecture key is as it was; generation ends at both end tokens and has no other setting."""
    write_small_files(GgufFile(write_gguf(checkpoint, tmp_path / "x.gguf")), tmp_path / "out")
    expected, actual = (json.loads((f / "config.json").read_text()) for f in (checkpoint, tmp_path / "out"))
    unstored = {"torch_dtype", "sliding_window", "max_window_layers", "initializer_range"}
    assert {key: value for key, value in expected.items() if key not in unstored} == actual
    generation = json.loads((tmp_path / "out/generation_config.json").read_text())
    assert {"eos_token_id": [642, 640], "pad_token_id": 640} == generation


def test_the_tokenizer_is_the_checkpoint_s(tmp_path: Path, checkpoint: Path) -> None:
    """Same ids for all texts, for us and through transformers, and the same chat template."""
    write_small_files(GgufFile(write_gguf(checkpoint, tmp_path / "x.gguf")), tmp_path / "out")
    expected, actual = (
        Tokenizer.from_file(str(f / "tokenizer.json")) for f in (checkpoint, tmp_path / "out")
    )
    ours, theirs = (AutoTokenizer.from_pretrained(folder) for folder in (checkpoint, tmp_path / "out"))
    for text in _TEXTS:
        ids = expected.encode(text).ids
        assert ids == actual.encode(text).ids == theirs(text).input_ids
        assert expected.decode(ids) == actual.decode(ids)
    assert expected.get_vocab() == actual.get_vocab()
    assert ours.chat_template == theirs.chat_template


def test_half_a_rope_scaling_is_refused(tmp_path: Path, checkpoint: Path) -> None:
    """A file that names a scaling of positions but not its factor is incomplete, not unscaled."""
    path = write_gguf(checkpoint, tmp_path / "x.gguf", qwen2__rope__scaling__type="yarn")
    with pytest.raises(ModelError, match=r"incomplete: no 'rope\.scaling\.factor'"):
        write_small_files(GgufFile(path), tmp_path / "out")


def test_other_architectures_are_named_and_refused(tmp_path: Path, checkpoint: Path) -> None:
    """A file of another architecture is one clear line."""
    path = write_gguf(checkpoint, tmp_path / "x.gguf", architecture="llama")
    with pytest.raises(ModelError, match=r"x\.gguf holds the architecture llama, not qwen2"):
        convert(path, tmp_path / "out", "float32", print)


@pytest.mark.parametrize("keep", [0, 3, 4, 23, 100, 5_000, -1])
def test_a_cut_off_file_is_refused(tmp_path: Path, checkpoint: Path, keep: int) -> None:
    """Wherever a file ends too early, it is refused before a tensor is read."""
    content = write_gguf(checkpoint, tmp_path / "x.gguf").read_bytes()
    (tmp_path / "x.gguf").write_bytes(content[:keep])
    with pytest.raises(ModelError, match=r"x\.gguf"):
        GgufFile(tmp_path / "x.gguf")


def test_a_file_of_another_kind_is_refused(tmp_path: Path) -> None:
    """Text is no GGUF."""
    (tmp_path / "x.gguf").write_text("version https://git-lfs.github.com/spec/v1\n" * 9)
    with pytest.raises(ModelError, match="no GGUF file that can be read: it does not begin like one"):
        GgufFile(tmp_path / "x.gguf")

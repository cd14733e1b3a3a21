"""Fingerprints follow content and nothing else."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest

from shared.models.error import ModelError
from shared.models.fingerprint import fingerprint, tokenizer_digest
from tests.support.tiny_model import build_tiny_model


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A tiny checkpoint."""
    return build_tiny_model(tmp_path / "one")


def _change_config(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))


def _differences(one: Path, other: Path) -> list[str]:
    return fingerprint(one, "float32", "a").differences(fingerprint(other, "float32", "a"))


def test_a_copy_elsewhere_is_the_same_model(folder: Path, tmp_path: Path) -> None:
    """Folder names and file times are no part of a fingerprint."""
    copy = shutil.copytree(folder, tmp_path / "two", copy_function=shutil.copyfile)
    assert [] == _differences(folder, copy)


def test_one_flipped_weight_bit_is_another_model(folder: Path, tmp_path: Path) -> None:
    """The weights' bytes count, to the last bit."""
    copy = shutil.copytree(folder, tmp_path / "two")
    content = bytearray((copy / "model.safetensors").read_bytes())
    content[-1] ^= 1
    (copy / "model.safetensors").write_bytes(content)
    assert ["weights"] == _differences(folder, copy)


def test_config_keys_count_if_they_change_what_is_computed(folder: Path, tmp_path: Path) -> None:
    """eps changes the fingerprint, rope says so by its own field too, and book-keeping keys do not matter."""
    copy = shutil.copytree(folder, tmp_path / "two")
    _change_config(copy, transformers_version="9", use_cache=False, eos_token_id=1, torch_dtype="bfloat16")
    assert [] == _differences(folder, copy)
    _change_config(copy, rms_norm_eps=1e-5)
    assert ["config"] == _differences(folder, copy)
    _change_config(copy, rms_norm_eps=1e-6, rope_theta=5.0)
    assert ["config", "rope"] == _differences(folder, copy)


def test_dtype_layout_and_tokenizer_are_compared(folder: Path, tmp_path: Path) -> None:
    """A worker with another dtype, KV layout or tokenizer does not match."""
    base = fingerprint(folder, "float32", "a")
    assert ["dtype", "layout"] == base.differences(fingerprint(folder, "bfloat16", "b"))
    copy = shutil.copytree(folder, tmp_path / "two")
    with (copy / "tokenizer.json").open("a") as out:
        out.write(" ")
    assert ["tokenizer"] == _differences(folder, copy)
    assert base.tokenizer == tokenizer_digest(folder)


def test_an_absent_tokenizer_is_a_clear_error(folder: Path) -> None:
    """What cannot be read is named."""
    (folder / "tokenizer.json").unlink()
    with pytest.raises(ModelError, match=r"tokenizer\.json"):
        tokenizer_digest(folder)

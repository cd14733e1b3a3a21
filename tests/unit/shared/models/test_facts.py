"""What is read from a checkpoint's JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from shared.models.error import ModelError
from shared.models.facts import SamplingDefaults, describe_rope, read_facts
from tests.support.tiny_model import build_tiny_model


def _generation(folder: Path, **content: Any) -> Path:
    (folder / "generation_config.json").write_text(json.dumps(content))
    return folder


def test_facts_of_the_tiny_checkpoint(tmp_path: Path) -> None:
    """Shapes come from the config, end tokens and sampling from the generation config."""
    facts = read_facts(build_tiny_model(tmp_path))
    assert ("Qwen2ForCausalLM", 3, 4, 2, 16) == (
        facts.architecture,
        facts.num_layers,
        facts.num_heads,
        facts.num_kv_heads,
        facts.head_dim,
    )
    assert (664, 4096) == (facts.vocab_size, facts.max_position_embeddings)
    assert (642, 640) == facts.eos_token_ids
    assert SamplingDefaults(0.7, 0.8, 20, 1.1) == facts.sampling


def test_without_sampling_greedy_is_the_default(tmp_path: Path) -> None:
    """do_sample false means temperature 0, whatever temperature stands beside it."""
    folder = _generation(build_tiny_model(tmp_path), do_sample=False, temperature=0.7, eos_token_id=5)
    facts = read_facts(folder)
    assert 0.0 == facts.sampling.temperature
    assert (5,) == facts.eos_token_ids


def test_absent_and_null_values_are_off(tmp_path: Path) -> None:
    """Without a generation config, and with nulls in it, nothing is filtered and the config's end token holds."""
    folder = _generation(build_tiny_model(tmp_path), temperature=None, top_k=None)
    assert SamplingDefaults() == read_facts(folder).sampling
    (folder / "generation_config.json").unlink()
    facts = read_facts(folder)
    assert SamplingDefaults() == facts.sampling
    assert (642,) == facts.eos_token_ids


def test_old_and_new_rope_keys_mean_the_same() -> None:
    """rope_theta + rope_scaling and rope_parameters are the same text if they mean the same."""
    old = {"rope_theta": 1000000, "rope_scaling": {"type": "yarn", "factor": 4.0}}
    new = {"rope_parameters": {"rope_type": "yarn", "factor": 4.0, "rope_theta": 1000000.0}}
    assert describe_rope(old) == describe_rope(new)
    assert describe_rope({"rope_theta": 1e6}) == describe_rope({"rope_theta": 1e6, "rope_scaling": None})
    assert describe_rope({"rope_theta": 1e6}) != describe_rope({"rope_theta": 1e4})


@pytest.mark.parametrize("content", ["{}", "[]", "{", '{"architectures": [], "num_attention_heads": 1}'])
def test_a_config_of_something_else_is_refused(tmp_path: Path, content: str) -> None:
    """A config that lacks what a language model has is one clear error."""
    (tmp_path / "config.json").write_text(content)
    with pytest.raises(ModelError, match=r"config\.json"):
        read_facts(tmp_path)

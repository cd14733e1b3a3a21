"""What the rest of the program needs to know about a checkpoint, read from its JSON files. Torch-free."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from shared.models.error import ModelError
from shared.models.files import read_json


@dataclass(frozen=True)
class SamplingDefaults:
    """What the checkpoint wants where a request says nothing. Values that are off: 1, 1, 0, 1."""

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = 0
    repetition_penalty: float = 1.0


@dataclass(frozen=True)
class ModelFacts:
    """Shapes, limits and defaults of one checkpoint.

    vocab_size: rows of the output layer, which may be more than the tokenizer has tokens.
    eos_token_ids: tokens that end a sequence, in the checkpoint's order; may be empty.
    rope: rotary settings as text; equal text means equal positions.
    """

    architecture: str
    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    vocab_size: int
    max_position_embeddings: int
    eos_token_ids: tuple[int, ...]
    sampling: SamplingDefaults
    rope: str


def read_facts(folder: Path) -> ModelFacts:
    """Read config.json and, if there is one, generation_config.json. Raises ModelError."""
    config = read_json(folder / "config.json")
    path = folder / "generation_config.json"
    generation = read_json(path) if path.is_file() else {}
    end_ids = generation.get("eos_token_id", config.get("eos_token_id"))
    try:
        num_heads = int(config["num_attention_heads"])
        return ModelFacts(
            architecture=str(config["architectures"][0]),
            num_layers=int(config["num_hidden_layers"]),
            num_heads=num_heads,
            num_kv_heads=int(config.get("num_key_value_heads") or num_heads),
            head_dim=int(config.get("head_dim") or config["hidden_size"] // num_heads),
            vocab_size=int(config["vocab_size"]),
            max_position_embeddings=int(config["max_position_embeddings"]),
            eos_token_ids=_ids(end_ids),
            sampling=_sampling(generation),
            rope=describe_rope(config),
        )
    except (KeyError, IndexError, TypeError, ValueError) as exc:
        raise ModelError(f"{folder / 'config.json'} is no config of a language model: {exc!r}") from exc


def describe_rope(config: dict[str, Any]) -> str:
    """Rotary settings in one canonical text, from the older keys (rope_theta, rope_scaling) or the newer one."""
    newer = config.get("rope_parameters") or {}
    settings = {"rope_theta": config.get("rope_theta", 10000.0)} | (config.get("rope_scaling") or {}) | newer
    settings["rope_type"] = settings.pop("type", None) or settings.get("rope_type") or "default"
    settings["rope_theta"] = float(settings["rope_theta"])
    return json.dumps(settings, sort_keys=True)


def _sampling(generation: dict[str, Any]) -> SamplingDefaults:
    greedy = generation.get("do_sample") is False
    default = SamplingDefaults()

    def value(name: str) -> Any:
        found = generation.get(name)
        return getattr(default, name) if found is None else found

    return SamplingDefaults(
        temperature=0.0 if greedy else float(value("temperature")),
        top_p=float(value("top_p")),
        top_k=max(0, int(value("top_k"))),
        repetition_penalty=float(value("repetition_penalty")),
    )


def _ids(value: int | list[int] | None) -> tuple[int, ...]:
    if value is None:
        return ()
    return (value,) if isinstance(value, int) else tuple(value)

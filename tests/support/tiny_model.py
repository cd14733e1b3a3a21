"""A complete Qwen2.5 checkpoint folder with random weights, small enough to build in every test session.

Torch-free. The weights are scaled so that greedy decoding is varied, depends on the whole prompt, and has
margins far above float32 noise: a wrong key or value shows as a wrong token.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray
from safetensors.numpy import save_file
from tokenizers import Tokenizer

from tests.support.tiny_tokenizer import END_OF_TEXT, SPECIAL, TURN_END, write_tiny_tokenizer

SPARE_ROWS = 19  # ids of the output layer that no token has, as in the real checkpoints
_EMBEDDING_STD, _LAYER_GAIN, _QUIET = 0.4, 1.6, 0.05

Array = NDArray[np.float32]


def build_tiny_model(folder: Path, *, seed: int = 0, **config_overrides: Any) -> Path:
    """Write config, float32 weights, tokenizer and generation config into `folder` (made if missing).

    The same seed and overrides give the same bytes. Overrides are config.json keys (`num_hidden_layers=2`).
    Special tokens and spare rows have quiet logits, so greedy answers do not end early: bias an end token.
    Returns `folder`.
    """
    folder.mkdir(parents=True, exist_ok=True)
    known = write_tiny_tokenizer(folder)
    ids = Tokenizer.from_file(str(folder / "tokenizer.json")).get_vocab()
    end_ids = [ids[TURN_END], ids[END_OF_TEXT]]
    config = _config(known + SPARE_ROWS, end_ids[0]) | config_overrides
    quiet = [ids[text] for text in SPECIAL] + list(range(known, config["vocab_size"]))
    _write_json(folder / "config.json", config)
    _write_json(
        folder / "generation_config.json",
        {
            "do_sample": True,
            "eos_token_id": end_ids,
            "pad_token_id": end_ids[1],
            "repetition_penalty": 1.1,
            "temperature": 0.7,
            "top_k": 20,
            "top_p": 0.8,
        },
    )
    save_file(_weights(config, seed, quiet), folder / "model.safetensors", metadata={"format": "pt"})
    return folder


def _config(vocab_size: int, end_id: int) -> dict[str, Any]:
    return {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "eos_token_id": end_id,
        "hidden_act": "silu",
        "hidden_size": 64,
        "initializer_range": 0.02,
        "intermediate_size": 160,
        "max_position_embeddings": 4096,
        "max_window_layers": 3,
        "model_type": "qwen2",
        "num_attention_heads": 4,
        "num_hidden_layers": 3,
        "num_key_value_heads": 2,
        "rms_norm_eps": 1e-06,
        "rope_theta": 1000000.0,
        "sliding_window": 4096,
        "tie_word_embeddings": True,
        "torch_dtype": "float32",
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": vocab_size,
    }


def _weights(config: dict[str, Any], seed: int, quiet: list[int]) -> dict[str, Array]:
    rng = np.random.default_rng(seed)
    hidden, inner, heads = config["hidden_size"], config["intermediate_size"], config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    kv_width = config["num_key_value_heads"] * head_dim

    def normal(*shape: int, std: float) -> Array:
        return rng.standard_normal(shape, dtype=np.float32) * np.float32(std)

    def linear(rows: int, columns: int, gain: float = 1.0) -> Array:
        return normal(rows, columns, std=gain / columns**0.5)

    def norm(width: int) -> Array:
        return 1 + normal(width, std=0.1)

    def vocabulary() -> Array:
        rows = normal(config["vocab_size"], hidden, std=_EMBEDDING_STD)
        rows[quiet] *= np.float32(_QUIET)
        return rows

    tensors = {"model.embed_tokens.weight": vocabulary(), "model.norm.weight": norm(hidden)}
    for layer in range(config["num_hidden_layers"]):
        at = f"model.layers.{layer}."
        tensors[at + "input_layernorm.weight"] = norm(hidden)
        tensors[at + "post_attention_layernorm.weight"] = norm(hidden)
        for name, width in (("q", heads * head_dim), ("k", kv_width), ("v", kv_width)):
            tensors[at + f"self_attn.{name}_proj.weight"] = linear(width, hidden, _LAYER_GAIN)
            tensors[at + f"self_attn.{name}_proj.bias"] = normal(width, std=0.3)
        tensors[at + "self_attn.o_proj.weight"] = linear(hidden, heads * head_dim, _LAYER_GAIN)
        tensors[at + "mlp.gate_proj.weight"] = linear(inner, hidden, _LAYER_GAIN)
        tensors[at + "mlp.up_proj.weight"] = linear(inner, hidden, _LAYER_GAIN)
        tensors[at + "mlp.down_proj.weight"] = linear(hidden, inner, _LAYER_GAIN)
    if not config["tie_word_embeddings"]:
        tensors["lm_head.weight"] = vocabulary()
    return tensors


def _write_json(path: Path, content: dict[str, Any]) -> None:
    path.write_text(json.dumps(content, indent=2, sort_keys=True))

"""Writes a checkpoint folder as a GGUF file of the Qwen2 kind, as llama.cpp's converter would."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from gguf import GGMLQuantizationType, GGUFWriter, TokenType, quantize
from safetensors.numpy import load_file

from tests.support.tiny_tokenizer import END_OF_TEXT, PLAIN_ADDED, TURN_END

_NAMES = {
    "embed_tokens": "token_embd",
    "model.norm": "output_norm",
    "lm_head": "output",
    "input_layernorm": "attn_norm",
    "post_attention_layernorm": "ffn_norm",
    "q_proj": "attn_q",
    "k_proj": "attn_k",
    "v_proj": "attn_v",
    "o_proj": "attn_output",
    "gate_proj": "ffn_gate",
    "up_proj": "ffn_up",
    "down_proj": "ffn_down",
}


def write_gguf(
    checkpoint: Path,
    path: Path,
    kind: GGMLQuantizationType = GGMLQuantizationType.F32,
    *,
    architecture: str = "qwen2",
    **metadata: str,
) -> Path:
    """Write `checkpoint` to `path` with its matrices quantised as `kind`; vectors stay float32.

    metadata: further text values; dots in the keys are written as double underscores.
    """
    config = json.loads((checkpoint / "config.json").read_text())
    writer = GGUFWriter(path, architecture)
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(config["num_attention_heads"])
    writer.add_head_count_kv(config["num_key_value_heads"])
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_rope_freq_base(config["rope_theta"])
    _add_tokenizer(writer, checkpoint, config["vocab_size"])
    for key, value in metadata.items():
        writer.add_string(key.replace("__", "."), value)
    for name, values in load_file(checkpoint / "model.safetensors").items():
        if values.ndim == 2 and kind != GGMLQuantizationType.F32:
            writer.add_tensor(_gguf_name(name), quantize(values, kind), raw_dtype=kind)
        else:
            writer.add_tensor(_gguf_name(name), values)
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def _add_tokenizer(writer: GGUFWriter, checkpoint: Path, num_rows: int) -> None:
    content: dict[str, Any] = json.loads((checkpoint / "tokenizer.json").read_text())
    tokens = sorted(content["model"]["vocab"], key=content["model"]["vocab"].__getitem__)
    kinds = [TokenType.NORMAL] * len(tokens)
    for added in content["added_tokens"]:
        tokens.append(added["content"])
        kinds.append(TokenType.USER_DEFINED if added["content"] in PLAIN_ADDED else TokenType.CONTROL)
    ids = {text: i for i, text in enumerate(tokens)}
    kinds += [TokenType.UNUSED] * (num_rows - len(tokens))
    tokens += [f"[PAD{i}]" for i in range(len(tokens), num_rows)]
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre("qwen2")
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges([" ".join(pair) for pair in content["model"]["merges"]])
    writer.add_eos_token_id(ids[TURN_END])
    writer.add_pad_token_id(ids[END_OF_TEXT])
    template = json.loads((checkpoint / "tokenizer_config.json").read_text())["chat_template"]
    writer.add_chat_template(template)


def _gguf_name(name: str) -> str:
    stem, _, ending = name.rpartition(".")
    parts = stem.split(".")
    short = next(gguf for part, gguf in _NAMES.items() if stem.endswith(part))
    return f"blk.{parts[2]}.{short}.{ending}" if "layers" in parts else f"{short}.{ending}"

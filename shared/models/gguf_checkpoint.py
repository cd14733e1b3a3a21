"""What a GGUF file of the Qwen2 architecture says, in the words of a checkpoint folder. Torch-free.

Names, config, tokenizer and end tokens; not the weights (shared.models.convert writes those).
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from typing import Any

import numpy as np
from gguf import TokenType
from tokenizers import AddedToken, Regex, Tokenizer
from tokenizers.decoders import ByteLevel as ByteLevelDecoder
from tokenizers.models import BPE
from tokenizers.normalizers import NFC
from tokenizers.pre_tokenizers import ByteLevel, Sequence, Split
from tokenizers.processors import ByteLevel as ByteLevelProcessor

from shared.models.error import ModelError
from shared.models.gguf_file import GgufFile

_ARCHITECTURE = "qwen2"
_END_TOKENS = ("<|im_end|>", "<|endoftext|>")
_QWEN2_WORD = (  # how Qwen2 cuts text before BPE
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n]*"
    r"|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_OUTER = {
    "token_embd": "model.embed_tokens",
    "output_norm": "model.norm",
    "output": "lm_head",
}
_INNER = {
    "attn_norm": "input_layernorm",
    "ffn_norm": "post_attention_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_TENSOR = re.compile(r"^blk\.(\d+)\.(.+)$")


def require_qwen2(source: GgufFile) -> None:
    """Raise ModelError if the file holds another architecture, or another kind of tokenizer."""
    architecture = source.metadata.get("general.architecture")
    if architecture != _ARCHITECTURE:
        raise ModelError(f"{source.path} holds the architecture {architecture}, not {_ARCHITECTURE}")
    kind = (source.metadata.get("tokenizer.ggml.model"), source.metadata.get("tokenizer.ggml.pre", "qwen2"))
    if kind != ("gpt2", "qwen2"):
        raise ModelError(f"{source.path}: a tokenizer of the kind {'/'.join(map(str, kind))}, not Qwen2's")


def checkpoint_name(gguf_name: str) -> str:
    """The name of a tensor in a Qwen2 checkpoint, from its name in GGUF. Raises ModelError if unknown."""
    stem, _, ending = gguf_name.rpartition(".")
    if (match := _LAYER_TENSOR.match(stem)) and match[2] in _INNER:
        return f"model.layers.{match[1]}.{_INNER[match[2]]}.{ending}"
    if stem in _OUTER:
        return f"{_OUTER[stem]}.{ending}"
    raise ModelError(f"a GGUF tensor that Qwen2 does not have: {gguf_name}")


def write_small_files(source: GgufFile, folder: Path) -> None:
    """Write config, generation config and tokenizer into `folder` (made if missing). Raises ModelError."""
    require_qwen2(source)
    folder.mkdir(parents=True, exist_ok=True)
    try:
        files = {
            "config.json": _config(source),
            "generation_config.json": _generation_config(source.metadata),
            "tokenizer_config.json": _tokenizer_config(source.metadata),
        }
        _tokenizer(source.metadata).save(str(folder / "tokenizer.json"))
    except (KeyError, IndexError) as exc:
        raise ModelError(f"{source.path} is incomplete: no {exc}") from exc
    for name, content in files.items():
        (folder / name).write_text(json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def _config(source: GgufFile) -> dict[str, Any]:
    values = {
        key.removeprefix(_ARCHITECTURE + "."): value
        for key, value in source.metadata.items()
        if key.startswith(_ARCHITECTURE + ".")
    }
    config = {
        "architectures": ["Qwen2ForCausalLM"],
        "attention_dropout": 0.0,
        "eos_token_id": source.metadata["tokenizer.ggml.eos_token_id"],
        "hidden_act": "silu",
        "hidden_size": values["embedding_length"],
        "intermediate_size": values["feed_forward_length"],
        "max_position_embeddings": values["context_length"],
        "model_type": _ARCHITECTURE,
        "num_attention_heads": values["attention.head_count"],
        "num_hidden_layers": values["block_count"],
        "num_key_value_heads": values["attention.head_count_kv"],
        "rms_norm_eps": _shortest(values["attention.layer_norm_rms_epsilon"]),
        "rope_theta": _shortest(values["rope.freq_base"]),
        "tie_word_embeddings": "output.weight" not in source.tensors,
        "use_cache": True,
        "use_sliding_window": False,
        "vocab_size": source.tensors["token_embd.weight"].shape[0],
    }
    scaling = values.get("rope.scaling.type", "none")
    if scaling != "none":
        config["rope_scaling"] = {"rope_type": scaling, "factor": _shortest(values["rope.scaling.factor"])}
        if original := values.get("rope.scaling.original_context_length"):
            config["rope_scaling"]["original_max_position_embeddings"] = original
    return config


def _generation_config(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    end_ids = [metadata["tokenizer.ggml.eos_token_id"]]
    ids = {text: tokens.index(text) for text in _END_TOKENS if text in tokens}
    end_ids += [i for i in ids.values() if i not in end_ids]
    pad_id = metadata.get("tokenizer.ggml.padding_token_id", end_ids[-1])
    return {"eos_token_id": end_ids, "pad_token_id": pad_id}


def _tokenizer_config(metadata: dict[str, Any]) -> dict[str, Any]:
    tokens = metadata["tokenizer.ggml.tokens"]
    end_id = metadata["tokenizer.ggml.eos_token_id"]
    config = {
        "add_bos_token": bool(metadata.get("tokenizer.ggml.add_bos_token", False)),
        "add_prefix_space": False,
        "bos_token": None,
        "clean_up_tokenization_spaces": False,
        "eos_token": tokens[end_id],
        "model_max_length": metadata[f"{_ARCHITECTURE}.context_length"],
        "pad_token": tokens[metadata.get("tokenizer.ggml.padding_token_id", end_id)],
        "tokenizer_class": "Qwen2Tokenizer",
        "unk_token": None,
    }
    if template := metadata.get("tokenizer.chat_template"):
        config["chat_template"] = template
    return config


def _tokenizer(metadata: dict[str, Any]) -> Tokenizer:
    """Byte-level BPE as Qwen2 has it. Rows that the file marks as unused get no token."""
    tokens = metadata["tokenizer.ggml.tokens"]
    kinds = metadata["tokenizer.ggml.token_type"]
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocabulary = {text: i for i, text in enumerate(tokens) if kinds[i] in (TokenType.NORMAL, TokenType.BYTE)}
    tokenizer = Tokenizer(BPE(vocab=vocabulary, merges=merges))
    tokenizer.normalizer = NFC()
    tokenizer.pre_tokenizer = Sequence(
        [Split(Regex(_QWEN2_WORD), "isolated"), ByteLevel(add_prefix_space=False, use_regex=False)]
    )
    tokenizer.decoder = ByteLevelDecoder()
    tokenizer.post_processor = ByteLevelProcessor(trim_offsets=False)
    # NOTE: added tokens get the next free id, so their rows must follow the vocabulary without a gap.
    for i, (text, kind) in enumerate(zip(tokens, kinds, strict=True)):
        if kind in (TokenType.CONTROL, TokenType.USER_DEFINED):
            added = AddedToken(text, special=kind == TokenType.CONTROL, normalized=False)
            (tokenizer.add_special_tokens if added.special else tokenizer.add_tokens)([added])
            if tokenizer.token_to_id(text) != i:
                raise ModelError(f"the token {text} is not where a Qwen2 tokenizer has it")
    return tokenizer


def _shortest(value: float) -> float:
    """The float with the fewest digits that is the same in float32, which is what GGUF stores."""
    return float(str(np.float32(value)))

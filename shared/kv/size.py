"""What a model's KV weighs, from the few fields of its config.json that decide it.

    MHA, GQA, MQA   2 (K and V) · layers · kv heads · head dim    numbers per token
    MLA             layers · (latent + rope)                      numbers per token

MLA is counted as DeepSeek's paper caches it: one latent and one rotated key for all heads. An engine that caches
the expanded heads instead holds far more. Every token counts in every layer, sliding window or not.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from importlib import resources
from typing import Literal

Attention = Literal["MHA", "GQA", "MQA", "MLA"]

_FULL_LAYERS = ("full_attention", "sliding_attention", "chunked_attention", "attention")
# Fields that, when set, mean other state than the formulas above count: recurrent layers, layers that share KV,
# keys of an indexer, cross attention.
_NOT_COUNTED = (
    "attn_layer_period",
    "full_attention_interval",
    "hybrid_override_pattern",
    "index_head_dim",
    "is_encoder_decoder",
    "mamba_d_state",
    "num_kv_shared_layers",
    "ssm_state_size",
)


class UnknownArchitecture(ValueError):
    """A config from which the size of KV cannot be told. The text is one clear line."""


@dataclass(frozen=True, slots=True)
class HeadKv:
    """K and V per head: in each of `num_layers` layers a token has K and V of [num_kv_heads, head_dim]."""

    num_layers: int
    num_heads: int
    num_kv_heads: int
    head_dim: int

    @property
    def attention(self) -> Attention:
        """MHA: as many KV heads as query heads; MQA: one for all of them; GQA: in between."""
        if self.num_kv_heads == self.num_heads:
            return "MHA"
        return "MQA" if self.num_kv_heads == 1 else "GQA"

    @property
    def elements_per_token(self) -> int:
        """Numbers that one token adds, over all layers."""
        return 2 * self.num_layers * self.num_kv_heads * self.head_dim

    @property
    def formula(self) -> str:
        """The same, for people."""
        heads = "head" if self.num_kv_heads == 1 else "heads"
        return f"2 x {self.num_layers} layers x {self.num_kv_heads} {heads} x {self.head_dim}"


@dataclass(frozen=True, slots=True)
class LatentKv:
    """MLA: in each layer a token has one compressed latent and one rotated key, shared by all heads."""

    num_layers: int
    latent_dim: int
    rope_dim: int

    @property
    def attention(self) -> Attention:
        """Always MLA."""
        return "MLA"

    @property
    def elements_per_token(self) -> int:
        """Numbers that one token adds, over all layers."""
        return self.num_layers * (self.latent_dim + self.rope_dim)

    @property
    def formula(self) -> str:
        """The same, for people."""
        return f"{self.num_layers} layers x ({self.latent_dim} latent + {self.rope_dim} rope)"


KvArchitecture = HeadKv | LatentKv


@dataclass(frozen=True, slots=True)
class KnownModel:
    """A model whose numbers ship with this package. hub_id: where its config.json is published."""

    name: str
    hub_id: str
    kv: KvArchitecture


def kv_bytes(kv: KvArchitecture, num_tokens: int, itemsize_bytes: int) -> int:
    """Bytes of KV of `num_tokens` positions; itemsize_bytes of one number: 2 in bfloat16, 1 in fp8 or int8.

    Tensor bytes alone: no blob header, no scales of a quantised format, no unused rest of a block.
    """
    return kv.elements_per_token * num_tokens * itemsize_bytes


def architecture_of(config: Mapping[str, object]) -> KvArchitecture:
    """Read a transformers config.json. Raises UnknownArchitecture.

    Layers: num_hidden_layers (n_layer). Heads: num_attention_heads (n_head). KV heads: num_key_value_heads, or
    num_kv_heads and multi_query as Falcon means them, else as many as heads. head_dim, else hidden_size (n_embd) /
    heads. MLA where kv_lora_rank is set: kv_lora_rank and qk_rope_head_dim. Of a model with parts: its text_config.
    Layers for multi-token prediction (num_nextn_predict_layers) come on top and are not counted.
    """
    text = config.get("text_config")
    if isinstance(text, Mapping):
        config = text
    _refuse_other_state(config)
    num_layers = _count(config, "num_hidden_layers", "n_layer")
    if config.get("kv_lora_rank") is not None:
        return LatentKv(num_layers, _count(config, "kv_lora_rank"), _count(config, "qk_rope_head_dim"))
    if config.get("v_head_dim") is not None:
        raise UnknownArchitecture("v_head_dim without kv_lora_rank is not understood")
    num_heads = _count(config, "num_attention_heads", "n_head")
    num_kv_heads = _num_kv_heads(config, num_heads)
    if num_heads % num_kv_heads:
        raise UnknownArchitecture(f"{num_heads} heads cannot share {num_kv_heads} KV heads")
    if config.get("head_dim") is not None:
        return HeadKv(num_layers, num_heads, num_kv_heads, _count(config, "head_dim"))
    hidden_size = _count(config, "hidden_size", "n_embd")
    if hidden_size % num_heads:
        raise UnknownArchitecture(f"a hidden size of {hidden_size} cannot be cut into {num_heads} heads")
    return HeadKv(num_layers, num_heads, num_kv_heads, hidden_size // num_heads)


def known_models() -> tuple[KnownModel, ...]:
    """The models of architectures.json, which holds the fields named above as their configs state them."""
    content = resources.files("shared.kv").joinpath("architectures.json").read_bytes()
    return tuple(
        KnownModel(entry["name"], entry["hub_id"], architecture_of(entry["config"]))
        for entry in json.loads(content)
    )


def find_model(name: str) -> KnownModel | None:
    """The known model of that name or hub id, in any case of letters; "-Instruct" at its end does not matter."""
    wanted = name.lower().removesuffix("-instruct")
    return next((m for m in known_models() if wanted in (m.name.lower(), m.hub_id.lower())), None)


def _refuse_other_state(config: Mapping[str, object]) -> None:
    for name in _NOT_COUNTED:
        if config.get(name):
            raise UnknownArchitecture(f"a model with {name} keeps other state than the K and V counted here")
    layer_types = config.get("layer_types")
    if layer_types is None:
        return
    if not isinstance(layer_types, list) or not all(kind in _FULL_LAYERS for kind in layer_types):
        raise UnknownArchitecture("layer_types names layers that do not keep K and V of every token")


def _num_kv_heads(config: Mapping[str, object], num_heads: int) -> int:
    if config.get("multi_query") and not config.get("new_decoder_architecture"):
        return 1
    for name in ("num_key_value_heads", "num_kv_heads"):
        if config.get(name) is not None:
            return _count(config, name)
    return num_heads


def _count(config: Mapping[str, object], *names: str) -> int:
    """The first of the fields that is there, as a positive integer."""
    value = next((config[name] for name in names if config.get(name) is not None), None)
    if value is None:
        raise UnknownArchitecture(f"{names[0]} is missing")
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        raise UnknownArchitecture(f"{names[0]} is no positive integer")
    return value

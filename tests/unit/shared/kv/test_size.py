"""Bytes of KV by architecture."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.kv.shape import ITEMSIZE_BYTES, KvDtype, KvShape
from shared.kv.size import (
    HeadKv,
    LatentKv,
    UnknownArchitecture,
    architecture_of,
    find_model,
    known_models,
    kv_bytes,
)

MIB = 1024 * 1024
HEADS: dict[str, Any] = {"num_hidden_layers": 4, "num_attention_heads": 8, "hidden_size": 64}


@pytest.mark.parametrize(
    ("name", "mib_128", "mib_1024"),
    [
        ("Qwen2.5-0.5B", 1.5, 12),
        ("Qwen2.5-1.5B", 3.5, 28),
        ("Qwen2.5-7B", 7, 56),
        ("Qwen2.5-72B", 40, 320),
        ("Llama-3.1-8B", 16, 128),
        ("Mistral-7B-v0.3", 16, 128),
        ("gemma-2b", 2.25, 18),
        ("falcon-7b", 1, 8),
        ("DeepSeek-V2-Lite", 3.796875, 30.375),
        ("DeepSeek-V3", 8.578125, 68.625),
    ],
)
def test_known_sizes_in_bfloat16(name: str, mib_128: float, mib_1024: float) -> None:
    """The table that the command prints, before it is rounded."""
    model = find_model(name)
    assert model is not None
    assert (mib_128, mib_1024) == tuple(kv_bytes(model.kv, n, 2) / MIB for n in (128, 1024))


def test_known_models_have_names_of_their_own() -> None:
    """A name finds its model, as does its hub id, in any case and as -Instruct."""
    models = known_models()
    assert len(models) == len({model.name.lower() for model in models})
    assert {"MHA", "GQA", "MQA", "MLA"} == {model.kv.attention for model in models}
    for model in models:
        for name in (model.name, model.name.upper(), model.hub_id, f"{model.name}-Instruct"):
            assert model == find_model(name)
    assert find_model("Qwen2.5") is None


@pytest.mark.parametrize(
    ("extra", "attention", "num_kv_heads", "head_dim"),
    [
        ({}, "MHA", 8, 8),
        ({"num_key_value_heads": None, "head_dim": None}, "MHA", 8, 8),
        ({"num_key_value_heads": 8}, "MHA", 8, 8),
        ({"num_key_value_heads": 2}, "GQA", 2, 8),
        ({"num_key_value_heads": 1, "head_dim": 32}, "MQA", 1, 32),
        ({"multi_query": True, "num_kv_heads": 8}, "MQA", 1, 8),
        ({"multi_query": True, "new_decoder_architecture": True, "num_kv_heads": 4}, "GQA", 4, 8),
        ({"multi_query": False, "num_kv_heads": None}, "MHA", 8, 8),
        ({"layer_types": ["full_attention", "sliding_attention"]}, "MHA", 8, 8),
        ({"kv_lora_rank": None, "is_encoder_decoder": False}, "MHA", 8, 8),
    ],
)
def test_heads_are_read_as_each_family_writes_them(
    extra: dict[str, object], attention: str, num_kv_heads: int, head_dim: int
) -> None:
    """Absent and null fields mean the same; head_dim wins over hidden_size."""
    kv = architecture_of(HEADS | extra)
    assert HeadKv(4, 8, num_kv_heads, head_dim) == kv
    assert attention == kv.attention
    assert 2 * 4 * num_kv_heads * head_dim == kv.elements_per_token


def test_other_names_of_the_same_fields() -> None:
    """GPT-2's names, and a model whose text part is one of several."""
    gpt2 = {"n_layer": 12, "n_head": 12, "n_embd": 768}
    assert HeadKv(12, 12, 12, 64) == architecture_of(gpt2)
    assert HeadKv(4, 8, 8, 8) == architecture_of(
        {"hidden_size": 1, "text_config": HEADS, "vision_config": {}}
    )


def test_mla_is_latent_and_rope_whatever_its_heads() -> None:
    """num_key_value_heads of such a config says nothing about the cache."""
    config = HEADS | {
        "num_key_value_heads": 8,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
        "v_head_dim": 128,
    }
    kv = architecture_of(config)
    assert LatentKv(4, 512, 64) == kv
    assert ("MLA", 4 * 576) == (kv.attention, kv.elements_per_token)


@given(
    layers=st.integers(1, 200),
    kv_heads=st.integers(1, 64),
    half_dim=st.integers(1, 256),
    tokens=st.integers(0, 10**6),
    dtype=st.sampled_from(sorted(ITEMSIZE_BYTES)),
)
def test_size_is_that_of_the_transfer(
    layers: int, kv_heads: int, half_dim: int, tokens: int, dtype: KvDtype
) -> None:
    """The formula here and the shape of a blob are one."""
    shape = KvShape(layers, kv_heads, 2 * half_dim, dtype)
    kv = HeadKv(layers, kv_heads, kv_heads, 2 * half_dim)
    assert shape.bytes_per_token * tokens == kv_bytes(kv, tokens, ITEMSIZE_BYTES[dtype])


@pytest.mark.parametrize(
    ("config", "message"),
    [
        ({}, "num_hidden_layers is missing"),
        ({"num_hidden_layers": 4}, "num_attention_heads is missing"),
        ({"num_hidden_layers": 4, "num_attention_heads": 8}, "hidden_size is missing"),
        (HEADS | {"num_hidden_layers": 0}, "num_hidden_layers is no positive integer"),
        (HEADS | {"num_hidden_layers": "4"}, "num_hidden_layers is no positive integer"),
        (HEADS | {"num_hidden_layers": True}, "num_hidden_layers is no positive integer"),
        (HEADS | {"num_key_value_heads": [2, 4]}, "num_key_value_heads is no positive integer"),
        (HEADS | {"num_key_value_heads": 3}, "8 heads cannot share 3 KV heads"),
        (HEADS | {"hidden_size": 65}, "cannot be cut into 8 heads"),
        (HEADS | {"kv_lora_rank": 512}, "qk_rope_head_dim is missing"),
        (HEADS | {"v_head_dim": 4}, "v_head_dim without kv_lora_rank"),
        (HEADS | {"layer_types": ["full_attention", "linear_attention"]}, "layer_types names layers"),
        (HEADS | {"layer_types": [["full_attention"]]}, "layer_types names layers"),
        (HEADS | {"is_encoder_decoder": True}, "is_encoder_decoder keeps other state"),
        (HEADS | {"num_kv_shared_layers": 10}, "num_kv_shared_layers keeps other state"),
    ],
)
def test_a_size_that_would_be_wrong_is_refused(config: dict[str, object], message: str) -> None:
    """A config that is not understood has no size, rather than a wrong one."""
    with pytest.raises(UnknownArchitecture, match=message):
        architecture_of(config)

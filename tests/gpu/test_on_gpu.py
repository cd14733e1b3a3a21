"""The same code on CUDA: both workers on one card, KV staged through pinned memory."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from shared.engine.kv_cache import CacheShape, KVCache
from shared.engine.staged_views import StagedSink, StagedSource
from shared.kv.shape import KINDS
from tests.support.cluster import run_cluster
from tests.support.completions import GREEDY, complete, random_prompt, token_ids
from tests.support.oracle import load_oracle

POOL: dict[str, Any] = {"device": "cuda", "kv_pool_bytes": 64 << 20, "chunk_size": 64}


@pytest.mark.parametrize("length", [1, 17, 64, 65, 257, 1024])
def test_greedy_over_pd_equals_plain_generate_in_float32(tiny_model: Path, length: int) -> None:
    """Ids exactly, cold and with a full prefix cache."""
    prompt = random_prompt(length, seed=length)
    expected = load_oracle(tiny_model, ends=False, device="cuda")(prompt, 16)
    settings = POOL | {"dtype": "float32"}

    with run_cluster(tiny_model, prefill=settings, decode=settings) as cluster:
        for _ in range(2):
            assert expected == token_ids(complete(cluster, prompt, max_tokens=16, **GREEDY))[0]
        cluster.check_nothing_left()


def test_bfloat16_is_the_default_and_equal_in_both_modes(tiny_model: Path) -> None:
    """Seeded sampling over PD and in unified mode draws the same tokens in bfloat16."""
    prompt = random_prompt(300, seed=1)
    fields: dict[str, Any] = {"max_tokens": 32, "temperature": 1.0, "seed": 5, "ignore_eos": True, "n": 3}
    answers = []
    for num_prefill in (1, 0):
        with run_cluster(tiny_model, num_prefill=num_prefill, prefill=POOL, decode=POOL) as cluster:
            assert cluster.decode[0].worker.kv_shape.dtype == "BF16"
            answers.append(token_ids(complete(cluster, prompt, **fields)))

    assert answers[0] == answers[1]


def test_staged_kv_arrives_bit_for_bit() -> None:
    """From one device pool into another through pinned memory."""
    device = torch.device("cuda")
    shape = CacheShape(4, 64, 16, 2, 64, torch.bfloat16)
    source, target = KVCache(shape, device), KVCache(shape, device)
    for tensor in (*source.k, *source.v):
        tensor.normal_()
    blocks = (40, 3, 17, 8)
    reader, sink = StagedSource(source, blocks), StagedSink(target, blocks)
    for layer in range(shape.num_layers):
        for kind in KINDS:
            (view,) = sink.views(layer, kind, 5, 61)
            view[:] = b"".join(reader.views(layer, kind, 5, 61))
    sink.chunk_filled(5, 61)

    slots = [blocks[p // 16] * 16 + p % 16 for p in range(5, 61)]
    for old, new in zip((*source.k, *source.v), (*target.k, *target.v), strict=True):
        assert torch.equal(old.flatten(0, 1)[slots], new.flatten(0, 1)[slots])

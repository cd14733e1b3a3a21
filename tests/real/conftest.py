"""The real 0.5B model, as `handoff up` gets it, and plain transformers on the same weights as its oracle."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from router.text.tokenizer import TextTokenizer
from shared.models.prepare import ensure_checkpoint
from shared.models.store import default_cache_dir
from tests.support.cluster import Cluster, run_cluster

Oracle = Callable[[list[int], int], list[int]]


@pytest.fixture(scope="session")
def real_model() -> Path:
    """Downloaded and converted if it is not in the cache yet."""
    cache = default_cache_dir(os.environ)
    return ensure_checkpoint(os.environ.get("HANDOFF_MODEL", "auto"), "float32", cache, print)


@pytest.fixture(scope="session")
def real_tokenizer(real_model: Path) -> TextTokenizer:
    """The router's own."""
    return TextTokenizer.load(real_model)


@pytest.fixture(scope="session")
def real_pd(real_model: Path) -> Iterator[Cluster]:
    """Prefill and decode worker with a copy-free view of the same weights, and a router."""
    pool = {"kv_pool_bytes": 256 << 20}
    with run_cluster(real_model, prefill=pool, decode=pool) as cluster:
        yield cluster


@pytest.fixture(scope="session")
def oracle(real_model: Path) -> Oracle:
    """(prompt ids, number of tokens) -> greedy ids of plain transformers `generate` in float32."""
    model = AutoModelForCausalLM.from_pretrained(real_model, dtype=torch.float32).eval()  # type: ignore[no-untyped-call]

    def generate(prompt: list[int], num_tokens: int) -> list[int]:
        ids = torch.tensor([prompt])
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            repetition_penalty=1.0,
        )
        answer: list[int] = out[0, len(prompt) :].tolist()
        return answer

    return generate

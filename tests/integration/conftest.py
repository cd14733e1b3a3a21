"""The tiny model, its oracle, and running clusters of it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM

from tests.support.cluster import Cluster, run_cluster
from tests.support.tiny_model import build_tiny_model

Oracle = Callable[[list[int], int], list[int]]


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen2.5 checkpoint."""
    return build_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def oracle(tiny_model: Path) -> Oracle:
    """(prompt ids, number of tokens) -> greedy ids of plain transformers, float32, no penalties, no end."""
    model = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32).eval()  # type: ignore[no-untyped-call]

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
            eos_token_id=None,
            pad_token_id=0,
        )
        answer: list[int] = out[0, len(prompt) :].tolist()
        return answer

    return generate


@pytest.fixture(scope="module")
def pd(tiny_model: Path) -> Iterator[Cluster]:
    """One prefill and one decode worker behind a router."""
    with run_cluster(tiny_model) as cluster:
        yield cluster


@pytest.fixture(scope="module")
def unified(tiny_model: Path) -> Iterator[Cluster]:
    """One decode worker that computes prompts itself, behind a router."""
    with run_cluster(tiny_model, num_prefill=0) as cluster:
        yield cluster

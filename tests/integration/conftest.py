"""The tiny model, its oracle, and running clusters of it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.support.cluster import Cluster, run_cluster
from tests.support.oracle import Oracle, load_oracle
from tests.support.tiny_model import build_tiny_model


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen2.5 checkpoint."""
    return build_tiny_model(tmp_path_factory.mktemp("tiny"))


@pytest.fixture(scope="session")
def oracle(tiny_model: Path) -> Oracle:
    """Greedy ids of plain transformers that no end token cuts short."""
    return load_oracle(tiny_model, ends=False)


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

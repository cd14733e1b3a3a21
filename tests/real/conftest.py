"""The real 0.5B model, as `handoff up` gets it, and plain transformers on the same weights as its oracle."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from router.text.tokenizer import TextTokenizer
from tests.support.cluster import Cluster, run_cluster
from tests.support.oracle import Oracle, load_oracle
from tests.support.real_model import real_checkpoint


@pytest.fixture(scope="session")
def real_model() -> Path:
    """Downloaded and converted if it is not in the cache yet."""
    return real_checkpoint()


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
    """Greedy ids of plain transformers on the same weights."""
    return load_oracle(real_model, ends=True)

"""The real 0.5B model, as `handoff up` gets it, and plain transformers on the same weights as its oracle."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from router.text.tokenizer import TextTokenizer
from shared.models.prepare import ensure_checkpoint
from shared.models.store import default_cache_dir
from tests.support.cluster import Cluster, run_cluster
from tests.support.oracle import Oracle, load_oracle


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
    """Greedy ids of plain transformers on the same weights."""
    return load_oracle(real_model, ends=True)

"""Both topologies, started once for all files of this folder, and every way to ask for text."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from router.text.tokenizer import TextTokenizer
from tests.support.answers import WAYS, Way
from tests.support.cluster import Cluster, run_cluster


@pytest.fixture(scope="package")
def pd(tiny_model: Path) -> Iterator[Cluster]:
    """One prefill and one decode worker behind a router."""
    with run_cluster(tiny_model) as cluster:
        yield cluster


@pytest.fixture(scope="package")
def unified(tiny_model: Path) -> Iterator[Cluster]:
    """One decode worker that computes prompts itself, behind a router."""
    with run_cluster(tiny_model, num_prefill=0) as cluster:
        yield cluster


@pytest.fixture(scope="package", params=["pd", "unified"])
def cluster(request: pytest.FixtureRequest) -> Cluster:
    """Each of the two."""
    found: Cluster = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=WAYS, ids=str)
def way(request: pytest.FixtureRequest) -> Way:
    """Chat and completions, whole and streamed."""
    found: Way = request.param
    return found


@pytest.fixture(scope="package")
def tokenizer(tiny_model: Path) -> TextTokenizer:
    """The checkpoint's tokenizer."""
    return TextTokenizer.load(tiny_model)


@pytest.fixture(scope="package")
def end_id(tokenizer: TextTokenizer) -> int:
    """The token that ends a turn."""
    return tokenizer.control_ids["<|im_end|>"]


@pytest.fixture(autouse=True, scope="package")
def _nothing_is_left(pd: Cluster, unified: Cluster) -> Iterator[None]:
    """After everything here, refused, cut and served, no worker holds anything."""
    boots = [running.worker.boot for running in (*pd.workers, *unified.workers)]
    yield
    assert boots == [running.worker.boot for running in (*pd.workers, *unified.workers)]
    pd.check_nothing_left()
    unified.check_nothing_left()

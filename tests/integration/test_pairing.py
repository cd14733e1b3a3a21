"""Workers whose KV would mean nothing to each other are never paired, and /ready says why."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import httpx
import pytest

from router.app import create_app
from router.checkpoint import Checkpoint
from router.settings import RouterSettings
from tests.support import http
from tests.support.cluster import SECRET, run_cluster, run_worker, wait_until
from tests.support.completions import GREEDY, complete, random_prompt, token_ids
from tests.support.servers import ServerThread
from tests.support.tiny_model import build_tiny_model


@pytest.mark.parametrize(
    ("decode", "field"),
    [({"dtype": "bfloat16"}, "dtype"), ({"seed": 1}, "weights"), ({"rope_theta": 5000.0}, "rope")],
    ids=["dtype", "weights", "rope"],
)
def test_a_conflicting_pair_is_refused_with_its_reason(
    tiny_model: Path, tmp_path: Path, decode: dict[str, Any], field: str
) -> None:
    """The same bytes in number, another meaning: 503, the differing field by name, and no request served."""
    settings = {key: value for key, value in decode.items() if key == "dtype"}
    other = tiny_model if settings else build_tiny_model(tmp_path / "tiny", **decode)
    with run_worker("prefill", tiny_model) as p, run_worker("decode", other, **settings) as d:
        router = RouterSettings(prefill_urls=(p.url,), decode_urls=(d.url,), recovery_wait_s=0)
        with ServerThread(create_app(router, Checkpoint.load(tiny_model, "tiny"), SECRET)) as server:

            def ready() -> httpx.Response:
                return http.get(f"{server.url}/ready")

            wait_until(lambda: bool(ready().json()["conflicts"]))
            assert 503 == ready().status_code
            (conflict,) = ready().json()["conflicts"]
            assert field in conflict["fields"]
            body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4}
            assert 503 == http.post(f"{server.url}/v1/completions", json=body).status_code


def test_block_sizes_may_differ(tiny_model: Path) -> None:
    """A prefill worker with blocks of 16 and a decode worker with blocks of 5 understand each other."""
    prompt = random_prompt(73, seed=8)
    answers = []
    for size in (16, 5):
        with run_cluster(tiny_model, decode={"block_size": size}) as cluster:
            answers.append(token_ids(complete(cluster, prompt, max_tokens=20, **GREEDY)))

    assert answers[0] == answers[1]


def test_the_shorter_context_of_the_two_counts(tiny_model: Path) -> None:
    """What only prefill could take is refused before any work, in the words for it, whole and streamed."""
    with run_cluster(tiny_model, decode={"max_model_len": 64}) as cluster:
        model = http.get(f"{cluster.url}/v1/models/tiny").json()
        for stream in (False, True):
            body = {"model": "tiny", "prompt": random_prompt(40, seed=1), "max_tokens": 60, "stream": stream}
            response = http.post(f"{cluster.url}/v1/completions", json=body)

            error = response.json()["error"]
            assert (400, "context_length_exceeded") == (response.status_code, error["code"])
            assert "maximum context length is 64 tokens" in error["message"]
        assert 24 == len(token_ids(complete(cluster, random_prompt(40, seed=1), max_tokens=24, **GREEDY))[0])

    assert 64 == model["max_model_len"]


@pytest.mark.parametrize("max_model_len", [2, 24])
def test_short_contexts_become_ready_and_serve(tiny_model: Path, max_model_len: int) -> None:
    """The router's probe once asked for 42 tokens whatever the workers took: /ready was 503 for ever."""
    limit = {"max_model_len": max_model_len}
    with run_cluster(tiny_model, prefill=limit, decode=limit) as cluster:
        prompt = random_prompt(max_model_len - 1, seed=1)
        assert 1 == len(token_ids(complete(cluster, prompt, max_tokens=1, **GREEDY))[0])


def test_a_worker_in_the_wrong_place_gets_no_work(tiny_model: Path) -> None:
    """An address of another role, one where nobody is, and one named twice: /ready tells, the others serve."""
    with run_worker("prefill", tiny_model, name="p") as p, run_worker("decode", tiny_model, name="d") as d:
        router = RouterSettings(
            prefill_urls=(p.url, d.url, f"{p.url}/"),
            decode_urls=(d.url, p.url, "http://127.0.0.1:9"),
            served_model_name="tiny",
        )
        with ServerThread(create_app(router, Checkpoint.load(tiny_model, "tiny"), SECRET)) as server:
            wait_until(lambda: http.get(f"{server.url}/ready").status_code == 200)
            report = http.get(f"{server.url}/ready").json()["workers"]
            body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4}
            statuses = [http.post(f"{server.url}/v1/completions", json=body).status_code for _ in range(4)]

    assert [True, False, True, False, False] == [worker["usable"] for worker in report]
    assert "is a decode worker, not a prefill worker" in report[1]["problem"]
    assert [200] * 4 == statuses

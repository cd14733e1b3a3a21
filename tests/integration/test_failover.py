"""Either side may die at any instant: the client sees the same tokens, a little later. Real kills."""

from __future__ import annotations

import json
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import http
from tests.support.cluster import metric, wait_until
from tests.support.completions import GREEDY, random_prompt
from tests.support.oracle import Oracle
from tests.support.processes import Deployment, deploy

NUM_TOKENS = 160


@pytest.fixture(scope="module")
def deployment(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """Two prefill and two decode workers behind a router."""
    with deploy(tiny_model, tmp_path_factory.mktemp("deployment")) as running:
        yield running


@pytest.fixture(autouse=True)
def healed(deployment: Deployment) -> None:
    """Every test begins with all workers alive."""
    deployment.heal()


def stream_ids(
    url: str, prompt: list[int], on_first: Callable[[httpx.Response], None], **fields: Any
) -> tuple[dict[int, list[int]], httpx.Response]:
    """Token ids of each choice of a streamed completion; `on_first` is called at the first event."""
    body = {"model": "tiny", "prompt": prompt, "stream": True, "return_token_ids": True, **fields}
    ids: dict[int, list[int]] = {}
    told = False
    with http.stream("POST", f"{url}/v1/completions", json=body, timeout=60) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            for choice in event["choices"]:
                ids.setdefault(choice["index"], []).extend(choice["token_ids"])
            if not told:
                told = True
                on_first(response)
    return ids, response


@pytest.mark.parametrize("n", [1, 3])
def test_a_killed_decode_worker_changes_no_token(deployment: Deployment, oracle: Oracle, n: int) -> None:
    """SIGKILL in the middle of a streamed answer: another decode worker goes on where it stopped."""
    prompt = random_prompt(70, seed=n)
    fields: dict[str, Any] = {
        "max_tokens": NUM_TOKENS,
        "n": n,
        "ignore_eos": True,
        "seed": 4,
        "temperature": 1,
    }
    if n == 1:
        fields |= GREEDY

    def kill(response: httpx.Response) -> None:
        deployment.worker_named(response.headers["x-handoff-decode-worker"]).kill()

    calm, _ = stream_ids(deployment.url, prompt, lambda _: None, **fields)
    broken, _ = stream_ids(deployment.url, prompt, kill, **fields)

    assert all(len(ids) == NUM_TOKENS for ids in calm.values())
    assert calm == broken
    if n == 1:
        assert oracle(prompt, NUM_TOKENS) == broken[0]


def test_a_killed_prefill_worker_costs_a_pause_only(deployment: Deployment, oracle: Oracle) -> None:
    """SIGKILL while it computes the prompt: another one prefills for the same answer."""
    prompt = random_prompt(3000, seed=11)
    answer: dict[str, Any] = {}

    def ask() -> None:
        body = {"model": "tiny", "prompt": prompt, "max_tokens": 8, "return_token_ids": True} | GREEDY
        answer["response"] = http.post(f"{deployment.url}/v1/completions", json=body, timeout=60)

    asking = threading.Thread(target=ask)
    asking.start()
    busy = list(deployment.prefill)
    wait_until(lambda: any(metric(p.url, "handoff_requests_live") > 0 for p in busy) or not asking.is_alive())
    victim = max(busy, key=lambda p: metric(p.url, "handoff_requests_live"))
    victim.kill()
    asking.join()

    assert 200 == answer["response"].status_code, answer["response"].text
    assert oracle(prompt, 8) == answer["response"].json()["choices"][0]["token_ids"]


def test_all_decode_workers_dead_is_an_error_in_seconds_until_one_is_back(deployment: Deployment) -> None:
    """With nobody left the client gets a status and an error body, not a hang; the router recovers by itself."""
    for worker in deployment.decode:
        worker.kill()

    body = {"model": "tiny", "prompt": [1, 2, 3], "max_tokens": 4}
    response = http.post(f"{deployment.url}/v1/completions", json=body, timeout=30)

    assert response.status_code in (502, 503), response.text
    assert set(response.json()["error"]) == {"message", "type", "param", "code"}
    assert "127.0.0.1" not in response.text
    for worker in deployment.prefill:
        wait_until(lambda url=worker.url: metric(url, "handoff_blocks_live") == 0)  # type: ignore[misc]

    deployment.heal()
    again = http.post(f"{deployment.url}/v1/completions", json=body, timeout=30)
    assert 200 == again.status_code, again.text


def test_a_stopped_decode_worker_does_not_hold_up_others(deployment: Deployment) -> None:
    """SIGSTOP one decode worker: requests are served by the other one."""
    deployment.decode[0].signal(signal.SIGSTOP)
    try:
        for seed in range(10):
            body = {"model": "tiny", "prompt": random_prompt(20, seed=seed), "max_tokens": 4}
            response = http.post(f"{deployment.url}/v1/completions", json=body, timeout=60)
            assert 200 == response.status_code, response.text
            assert response.headers["x-handoff-decode-worker"] == "d1"
    finally:
        deployment.decode[0].signal(signal.SIGCONT)


def test_sigterm_lets_a_running_stream_finish(deployment: Deployment) -> None:
    """The first SIGTERM drains: the stream ends whole, the process exits 0, new requests go elsewhere."""
    worker = None

    def stop(response: httpx.Response) -> None:
        nonlocal worker
        worker = deployment.worker_named(response.headers["x-handoff-decode-worker"])
        worker.signal(signal.SIGTERM)

    ids, _ = stream_ids(deployment.url, random_prompt(30, seed=1), stop, max_tokens=NUM_TOKENS, **GREEDY)

    assert NUM_TOKENS == len(ids[0])
    assert worker is not None
    assert 0 == worker.wait()

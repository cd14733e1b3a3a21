"""What real processes say and do around requests: their log lines, and SIGTERM with streams running."""

from __future__ import annotations

import json
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import http
from tests.support.cluster import metric, wait_until
from tests.support.processes import Deployment, Process, deploy

SECRET_WORDS = "Xylophone quartz"
EVENTS = {"router": "completion", "prefill": "prefill", "decode": "decode"}


@pytest.fixture(scope="module")
def deployment(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Deployment]:
    """One process of each kind."""
    with deploy(tiny_model, tmp_path_factory.mktemp("lines"), num_prefill=1, num_decode=1) as running:
        yield running


@pytest.fixture(autouse=True)
def healed(deployment: Deployment) -> None:
    """Every test begins with all processes alive."""
    deployment.heal()


def lines_of(process: Process, request_id: str) -> list[dict[str, Any]]:
    """The process's final lines of a request; there may be none yet."""
    lines = [json.loads(line) for line in process.log_text().splitlines() if line.startswith("{")]
    found = [line for line in lines if line.get("request_id", "").startswith(request_id)]
    return [line for line in found if line["event"] == EVENTS[process.role]]


def ask(deployment: Deployment, **fields: Any) -> httpx.Response:
    """A completion of words that no log may repeat."""
    body = {"model": "tiny", "prompt": SECRET_WORDS, "max_tokens": 4, "ignore_eos": True} | fields
    return http.post(f"{deployment.url}/v1/completions", json=body)


def leave(deployment: Deployment, num_events: int) -> str:
    """Hang up after so many events; the request's id."""
    body = {"prompt": SECRET_WORDS, "max_tokens": 3000, "ignore_eos": True, "stream": True}
    with http.stream("POST", f"{deployment.url}/v1/completions", json=body) as response:
        lines = response.iter_lines()
        while num_events:
            num_events -= next(lines).startswith("data: ")
        request_id: str = response.headers["x-request-id"]
        return request_id


def test_each_process_tells_of_each_request_once(deployment: Deployment) -> None:
    """Ending, tokens and stage times under one id in all three logs; no prompt, no looks at /health."""
    ended = [(ask(deployment).headers["x-request-id"], "ok"), (leave(deployment, 3), "client_gone")]
    refused = ask(deployment, stop_token_ids=[10**6])

    for request_id, ending in ended:
        for process in deployment.processes:
            wait_until(lambda p=process, i=request_id: bool(lines_of(p, i)))  # type: ignore[misc]
            (line,) = lines_of(process, request_id)
            assert (process.role, line["ending"]) in {(process.role, ending), ("prefill", "ok")}
            assert 6 <= line["prompt_tokens"] <= 40
        (line,) = lines_of(deployment.router, request_id)
        assert {"completion_tokens", "route_s", "prefill_s", "decode_s", "total_s"} <= set(line)
    assert 400 == refused.status_code
    assert refused.headers["x-request-id"] in deployment.router.log_text()
    for process in deployment.processes:
        text = process.log_text()
        assert "Xylophone" not in text
        assert '"/health"' not in text
        assert '"/metrics"' not in text


def test_failed_work_is_told_with_its_reason(deployment: Deployment) -> None:
    """A request that no worker could take has a final line at the router, with the error's code."""
    deployment.decode[0].kill()

    response = ask(deployment)

    assert response.status_code in (502, 503)
    request_id = response.headers["x-request-id"]
    wait_until(lambda: bool(lines_of(deployment.router, request_id)))
    (line,) = lines_of(deployment.router, request_id)
    assert response.json()["error"]["code"] == line["ending"]


@pytest.mark.parametrize("role", ["router", "prefill", "decode"])
def test_sigterm_with_streams_running(deployment: Deployment, role: str) -> None:
    """They finish whole, nothing new is taken, and the process exits 0.

    A process that drains ends with its last stream, so its own answer to /ready shows that the stream still runs.
    """
    process = next(p for p in deployment.processes if p.role == role)
    body = {"prompt": "x", "max_tokens": 2000, "ignore_eos": True, "stream": True}
    body |= {"stream_options": {"include_usage": True}}
    with http.stream("POST", f"{deployment.url}/v1/completions", json=body) as response:
        lines = response.iter_lines()
        while not next(lines).startswith("data: {"):
            pass
        process.signal(signal.SIGTERM)
        if role != "prefill":  # its part is over before the first token is shown
            wait_until(lambda: http.get(f"{process.url}/ready").status_code == 503)
        wait_until(lambda: http.get(f"{deployment.url}/ready").status_code == 503)
        refused = ask(deployment)
        rest = [line.removeprefix("data: ") for line in lines if line.startswith("data: ")]

    assert 503 == refused.status_code, refused.text
    assert int(refused.headers["retry-after"]) >= 1
    assert "[DONE]" == rest.pop()
    assert 2000 == json.loads(rest.pop())["usage"]["completion_tokens"]
    assert 0 == process.wait()
    for other in (*deployment.prefill, *deployment.decode):
        if other is not process:
            wait_until(lambda url=other.url: metric(url, "handoff_blocks_live") == 0)  # type: ignore[misc]

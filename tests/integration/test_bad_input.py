"""Bad input is a clear 4xx in the OpenAI shape, and both workers go on serving."""

from __future__ import annotations

from typing import Any

import httpx
import pytest

from tests.support import http
from tests.support.cluster import AUTH, Cluster
from tests.support.completions import GREEDY, complete, random_prompt

HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]
COMPLETIONS: list[dict[str, Any]] = [
    {"prompt": ""},
    {"prompt": [""]},
    {"prompt": []},
    {"prompt": [[]]},
    {"prompt": ["hello", ""]},
    {},
    {"prompt": None},
    {"prompt": [99999999]},
    {"prompt": [-1]},
    {"prompt": [1.5]},
    {"prompt": {"a": 1}},
    {"prompt": "x", "max_tokens": "five"},
    {"prompt": "x", "temperature": -1},
    {"prompt": "x", "top_p": 2},
    {"prompt": "x", "n": 0},
    {"prompt": "x", "stop_token_ids": [999999]},
    {"prompt": "x", "stop_token_ids": [-3]},
    {"prompt": "x", "stop_token_ids": ["151645"]},
    {"prompt": "x", "logit_bias": {"999999": 1}},
    {"prompt": "x", "logprobs": 100},
    {"prompt": "x", "suffix": "y"},
    {"prompt": "x", "max_tokens": 10**9},
    {"prompt": "x " * 9000},
    {"prompt": "x", "stream_options": {"include_usage": True}},
]
CHATS: list[dict[str, Any]] = [
    {"messages": []},
    {},
    {"messages": None},
    {"messages": [{}]},
    {"messages": [{"role": "user"}]},
    {"messages": [{"role": "user", "content": None}]},
    {"messages": "hi"},
    {"messages": [{"role": "wizard", "content": "x"}]},
    {"messages": HI, "stop_token_ids": [999999]},
    {"messages": HI, "top_logprobs": 3},
    {"messages": HI, "top_logprobs": 21, "logprobs": True},
]
BODIES = [b"", b"{", b"[]", b"null", b'"x"', b"\xff\xfe", b'{"a": NaN}', b"[" * 100_000]


def check_error(response: httpx.Response, status: int) -> None:
    """Exactly the OpenAI shape, as JSON."""
    assert status == response.status_code, response.text
    assert "application/json" in response.headers["content-type"]
    error = response.json()["error"]
    assert {"message", "type", "param", "code"} == set(error)
    assert isinstance(error["message"], str)
    assert error["message"]


@pytest.fixture(autouse=True, scope="module")
def still_serving(pd: Cluster) -> Any:
    """After all of it a normal request is answered by the same two workers."""
    boots = [w.worker.boot for w in pd.workers]
    yield
    complete(pd, random_prompt(20, seed=3), max_tokens=4, **GREEDY)
    assert boots == [w.worker.boot for w in pd.workers]
    pd.check_nothing_left()


@pytest.mark.parametrize("fields", COMPLETIONS, ids=lambda f: str(f)[:40])
def test_bad_completions_are_400(pd: Cluster, fields: dict[str, Any]) -> None:
    """Nothing of a bad request reaches a worker."""
    before = pd.decode[0].metric("handoff_decode_requests_total")

    check_error(http.post(f"{pd.url}/v1/completions", json={"model": "tiny"} | fields), 400)

    assert before == pd.decode[0].metric("handoff_decode_requests_total")


@pytest.mark.parametrize("fields", CHATS, ids=lambda f: str(f)[:40])
def test_bad_chats_are_400(pd: Cluster, fields: dict[str, Any]) -> None:
    """The same for conversations."""
    check_error(http.post(f"{pd.url}/v1/chat/completions", json={"model": "tiny"} | fields), 400)


@pytest.mark.parametrize("body", BODIES, ids=lambda b: repr(b[:12]))
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
def test_what_is_no_json_object_is_400(pd: Cluster, path: str, body: bytes) -> None:
    """Also when it is empty, nested without end, or not text."""
    check_error(http.post(f"{pd.url}{path}", content=body), 400)


def test_an_unknown_model_is_404(pd: Cluster) -> None:
    """With the code that clients look for."""
    response = http.post(f"{pd.url}/v1/completions", json={"model": "no-such", "prompt": "x"})

    check_error(response, 404)
    assert response.json()["error"]["code"] == "model_not_found"


def test_unknown_paths_and_methods_have_the_same_shape(pd: Cluster) -> None:
    """404 and 405 are errors too."""
    check_error(http.get(f"{pd.url}/v1/nothing"), 404)
    check_error(http.post(f"{pd.url}/v1/completions/", json={}), 404)
    check_error(http.get(f"{pd.url}/v1/completions"), 405)


def test_a_too_long_prompt_says_what_clients_search_for(pd: Cluster) -> None:
    """The text has "maximum context length" and the true counts."""
    prompt = random_prompt(4096, seed=1)
    response = http.post(f"{pd.url}/v1/completions", json={"model": "tiny", "prompt": prompt})

    check_error(response, 400)
    error = response.json()["error"]
    assert error["code"] == "context_length_exceeded"
    assert "maximum context length is 4096 tokens" in error["message"]


def test_a_huge_body_is_413(pd: Cluster) -> None:
    """The limit is checked before anything is parsed."""
    response = http.post(f"{pd.url}/v1/completions", content=b"x" * (17 << 20))

    check_error(response, 413)


@pytest.mark.parametrize("path", ["/v1/prefill", "/v1/decode", "/v1/decode/stop"])
def test_workers_refuse_bad_work_in_the_same_shape(pd: Cluster, path: str) -> None:
    """A worker that is called directly is as strict."""
    worker = pd.prefill[0] if path == "/v1/prefill" else pd.decode[0]

    check_error(http.post(f"{worker.url}{path}", json={"x": 1}, headers=AUTH), 400)
    check_error(http.post(f"{worker.url}{path}", json={"x": 1}), 401)

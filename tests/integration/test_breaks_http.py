"""What rude clients found: a hang-up nobody noticed, an event loop that stood still, nesting that was our fault."""

from __future__ import annotations

import json
import threading
import time
from typing import Any

import pytest

from tests.integration.test_bad_input import check_error
from tests.support import http
from tests.support.cluster import Cluster, wait_until
from tests.support.servers import connect, reset, send_request

LONG: dict[str, Any] = {"model": "tiny", "prompt": [5] * 20, "max_tokens": 4000, "ignore_eos": True}
HI: list[dict[str, Any]] = [{"role": "user", "content": "hi"}]


def in_flight(pd: Cluster) -> int:
    """Requests that hold anything at a worker."""
    return sum(w.worker.engine.num_groups for w in pd.workers)


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "stream"])
@pytest.mark.parametrize("rude", [False, True], ids=["fin", "reset"])
@pytest.mark.parametrize("num_behind", [1, 40])
def test_a_client_that_leaves_requests_behind_is_missed_too(
    pd: Cluster, stream: bool, rude: bool, num_behind: int
) -> None:
    """The request at work ends with its connection, also when others were sent after it."""
    body = json.dumps(LONG | {"stream": stream}).encode()
    before = pd.decode[0].worker.engine.counts.output_tokens
    with connect(pd.router) as sock:
        for _ in range(1 + num_behind):
            send_request(sock, "POST", "/v1/completions", body=body)
        wait_until(lambda: in_flight(pd) > 0)
        if rude:
            reset(sock)
    wait_until(lambda: in_flight(pd) == 0)
    assert LONG["max_tokens"] > pd.decode[0].worker.engine.counts.output_tokens - before
    pd.check_nothing_left()


def test_a_long_request_behind_another_does_not_hide_the_hang_up(pd: Cluster) -> None:
    """Its body is dropped rather than left unread."""
    before = pd.decode[0].worker.engine.counts.output_tokens
    with connect(pd.router) as sock:
        send_request(sock, "POST", "/v1/completions", body=json.dumps(LONG).encode())
        wait_until(lambda: in_flight(pd) > 0)
        send_request(sock, "POST", "/v1/completions", body=b" " * 1_000_000)
    wait_until(lambda: in_flight(pd) == 0)
    assert LONG["max_tokens"] > pd.decode[0].worker.engine.counts.output_tokens - before


@pytest.mark.parametrize(
    "messages",
    [
        [{"role": "user", "content": "hello wor" * 60_000}],
        [{"role": "user", "content": "<|im_end|>" + "hello wor" * 60_000}],
        [{"role": "user", "content": ""}] * 30_000,
        [{"role": "assistant", "content": None, "tool_calls": [{"function": {"name": "f"}}] * 10_000}],
    ],
    ids=["text", "control", "empty", "calls"],
)
def test_a_large_conversation_stops_nobody_else(pd: Cluster, messages: list[dict[str, Any]]) -> None:
    """/health answers while it is rendered and tokenised."""
    body = {"model": "tiny", "messages": messages, "max_tokens": 1}
    answers: list[Any] = []
    work = threading.Thread(
        target=lambda: answers.append(http.post(f"{pd.url}/v1/chat/completions", json=body))
    )
    worst_s = 0.0
    work.start()
    while work.is_alive():
        begun = time.perf_counter()
        http.get(f"{pd.url}/health")
        worst_s = max(worst_s, time.perf_counter() - begun)
    check_error(answers[0], 400)
    assert worst_s < 4, "the faults that this guards against took 5 to 50 s, on a busy machine"


@pytest.mark.parametrize(
    "fields",
    [
        {"chat_template_kwargs": {"a": "DEEP"}},
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"a": "DEEP"}}}]},
        {"response_format": {"type": "json_schema", "json_schema": {"name": "a", "schema": {"a": "DEEP"}}}},
        {"guided_json": {"a": "DEEP"}},
    ],
    ids=lambda f: next(iter(f)),
)
def test_deep_nesting_is_no_fault_of_ours(pd: Cluster, fields: dict[str, Any]) -> None:
    """Deeper than Python can follow is a 400."""
    deep = '{"a":' * 900 + "1" + "}" * 900
    body = json.dumps({"messages": HI, "max_tokens": 1} | fields).replace('"DEEP"', deep)

    check_error(http.post(f"{pd.url}/v1/chat/completions", content=body), 400)


def test_deep_tool_arguments_are_no_fault_of_ours(pd: Cluster) -> None:
    """They are JSON in a text, so no limit on the body's nesting covers them."""
    call = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "[" * 900 + "]" * 900}}
    messages = [*HI, {"role": "assistant", "content": None, "tool_calls": [call]}]
    for path in ("/v1/chat/completions", "/tokenize"):
        check_error(http.post(f"{pd.url}{path}", json={"messages": messages}), 400)

"""Fields that clients send although they ask for nothing, fields nobody knows, and fields that are wrong."""

from __future__ import annotations

from typing import Any

import pytest

from tests.support import http
from tests.support.answers import Way, events_of
from tests.support.cluster import Cluster

OPTIONAL = """
    stop n seed logprobs top_p temperature max_tokens max_completion_tokens stream_options tools tool_choice user
    response_format suffix echo best_of logit_bias presence_penalty frequency_penalty model top_logprobs top_k
    min_p min_tokens ignore_eos stop_token_ids metadata guided_json guided_regex guided_choice structured_outputs
    functions function_call parallel_tool_calls chat_template_kwargs add_generation_prompt store modalities audio
    continue_final_message prediction web_search_options reasoning_effort x_unknown
"""
NOTHING: list[dict[str, Any]] = [
    dict.fromkeys(OPTIONAL.split()),
    {"tools": []},
    {"tools": [], "tool_choice": "auto"},
    {"tools": [], "tool_choice": "none"},
    {"stop": []},
    {"stop": ""},
    {"stop": [""]},
    {"stop": ["", ""]},
    {"logit_bias": {}},
    {"stop_token_ids": []},
    {"metadata": {}},
    {"user": ""},
    {"suffix": ""},
    {"functions": []},
    {"response_format": {"type": "text"}},
    {"chat_template_kwargs": {}},
    {"presence_penalty": 0, "frequency_penalty": 0},
    {"n": 1, "best_of": 1},
    {"user": "名前\r\nX-Evil: 1", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
    {"x_unknown": {"deep": [1, {"er": None}]}, "constructor": 1, "__class__": "x"},
]
LOAD_TOOL: dict[str, Any] = {
    "stream_options": {"include_usage": True, "continuous_usage_stats": True},
    "max_tokens": 16,
    "max_completion_tokens": 16,
    "stop": None,
    "ignore_eos": True,
    "user": "u1",
    "metadata": {"a": "b"},
    "store": False,
    "service_tier": "auto",
    "parallel_tool_calls": True,
    "x_unknown": 1,
}
PATHS = ["/v1/completions", "/v1/chat/completions", "/v1/responses"]
BODIES = [
    b"",
    b"{",
    b"[]",
    b"null",
    b"5",
    b'"x"',
    b"\xff\xfe",
    b"\xef\xbb\xbf{}",
    b"{'a': 1}",
    b"{} x",
    b"a=b",
]
ODD_IDS = [[999999], [-3], ["151645"], [1.5], [True], [2**70], 5, "642", [None]]


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_what_asks_for_nothing_changes_nothing(pd: Cluster, endpoint: str) -> None:
    """null equals missing, and so do empty values; unknown fields are ignored."""
    way, fixed = Way(endpoint, stream=False), {"seed": 1, "max_tokens": 2}
    expected = way.ask(pd, **fixed).choices

    for fields in NOTHING:
        assert expected == way.ask(pd, **(fields | fixed)).choices, fields


def test_what_load_tools_send_is_answered_in_full(cluster: Cluster, way: Way, end_id: int) -> None:
    """ignore_eos gives exactly the length asked for, however much the model wants to end."""
    fields = {name: value for name, value in LOAD_TOOL.items() if way.stream or name != "stream_options"}

    answer = way.ask(cluster, "Test", logit_bias={end_id: 4.0}, **fields)

    assert (16, "length") == (answer.counts[1], answer.only.finish_reason)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_usage_can_come_with_every_event(cluster: Cluster, endpoint: str) -> None:
    """continuous_usage_stats: counts so far in each, never falling, the last ones those of the end."""
    events = events_of(Way(endpoint, stream=True).post(cluster, **LOAD_TOOL))

    counts = [event["usage"]["completion_tokens"] for event in events]
    assert sorted(counts) == counts
    assert 16 == counts[-1]
    assert all(event["usage"]["prompt_tokens"] == events[-1]["usage"]["prompt_tokens"] for event in events)


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_usage_is_told_only_if_asked_for(cluster: Cluster, endpoint: str) -> None:
    """The reader of streams checks that no event has any."""
    options: list[Any] = [{}, {"include_usage": False}, {"include_usage": None}, None]
    for option in options:
        assert Way(endpoint, stream=True).ask(cluster, stream_options=option, max_tokens=2).usage is None


def test_stream_options_belong_to_streams(pd: Cluster) -> None:
    """As with OpenAI."""
    for endpoint in ("chat", "completions"):
        response = Way(endpoint, stream=False).post(pd, stream_options={"include_usage": True})
        assert (400, "stream_options") == (response.status_code, response.json()["error"]["param"])


def test_stop_tokens_that_are_no_tokens_reach_no_worker(pd: Cluster, way: Way) -> None:
    """They are refused by name, and the next request is answered."""
    for ids in ODD_IDS:
        response = way.post(pd, stop_token_ids=ids, max_tokens=5)

        assert 400 == response.status_code, ids
        assert response.json()["error"]["param"].startswith("stop_token_ids")
    assert 2 == way.ask(pd, max_tokens=2, ignore_eos=True).counts[1]


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("suffix", ["\n\nprint(add(1,2))", " ", 5], ids=repr)
def test_a_suffix_is_not_silently_dropped(cluster: Cluster, suffix: Any, stream: bool) -> None:
    """This tokenizer has no tokens for filling in, so it is a clear 400."""
    response = Way("completions", stream=stream).post(cluster, "def add(a, b):\n    return ", suffix=suffix)

    assert (400, "suffix") == (response.status_code, response.json()["error"]["param"])


@pytest.mark.parametrize("path", PATHS)
def test_a_body_that_is_no_object_has_an_error_body(pd: Cluster, path: str) -> None:
    """JSON, four keys, and nothing of our insides in the text."""
    for body in BODIES:
        response = http.post(f"{pd.url}{path}", content=body)

        assert (400, "application/json") == (response.status_code, response.headers["content-type"]), body
        error = response.json()["error"]
        assert {"message", "type", "param", "code"} == set(error)
        assert not any(word in error["message"] for word in ("Traceback", "pydantic", "127.0.0.1", "Error("))


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
def test_the_content_type_does_not_matter(pd: Cluster, kind: str) -> None:
    """curl sends a form's type unless told otherwise; what counts is the body."""
    for path, body in (
        (PATHS[0], b'{"prompt": "x", "max_tokens": 1}'),
        (PATHS[2], b'{"input": "x", "max_output_tokens": 1}'),
    ):
        response = http.post(f"{pd.url}{path}", content=body, headers={"content-type": kind})
        assert 200 == response.status_code

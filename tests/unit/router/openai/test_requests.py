"""Request bodies: what is accepted, what is refused, and that the error names the field."""

from __future__ import annotations

import json
from contextlib import suppress
from typing import Any

import openai.types as completion_types
import openai.types.chat as chat_types
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from router.openai.fields import CHAT_FIELDS, COMPLETION_FIELDS
from router.openai.requests import ChatRequest, CompletionRequest, parse_chat, parse_completion
from router.openai.shared_fields import Limits
from shared.errors import InvalidRequest

LIMITS = Limits(max_choices=4, max_prompts=3, max_total_choices=6)
HI = [{"role": "user", "content": "hi"}]


def completion(**body: Any) -> CompletionRequest:
    """A completion request, with a prompt unless one is given."""
    return parse_completion(json.dumps({"prompt": "Hi"} | body).encode(), LIMITS)


def chat(**body: Any) -> ChatRequest:
    """A chat request, with a message unless some are given."""
    return parse_chat(json.dumps({"messages": HI} | body).encode(), LIMITS)


@pytest.mark.parametrize("body", [b"", b"{", b"[]", b'"x"', b"null", b"\xff", b'{"prompt": NaN}'])
@pytest.mark.parametrize("parse", [parse_completion, parse_chat])
def test_a_body_that_is_no_json_object_is_refused(parse: Any, body: bytes) -> None:
    """Broken JSON and other JSON than an object are client errors."""
    with pytest.raises(InvalidRequest, match="JSON"):
        parse(body, LIMITS)


NULLABLE = (
    "stop n seed logprobs top_p temperature max_tokens max_completion_tokens stream stream_options tools "
    "tool_choice response_format user suffix echo best_of logit_bias presence_penalty frequency_penalty top_k "
    "min_p repetition_penalty min_tokens ignore_eos stop_token_ids top_logprobs add_generation_prompt "
    "continue_final_message chat_template_kwargs parallel_tool_calls model functions function_call"
)


def test_null_equals_missing() -> None:
    """Every optional field may be null and then means what leaving it out means."""
    nulls = dict.fromkeys(NULLABLE.split())

    assert completion() == completion(**nulls)
    assert chat() == chat(**nulls)


@pytest.mark.parametrize(
    "empty",
    [
        {"tools": []},
        {"stop": []},
        {"stop": ""},
        {"stop": [""]},
        {"logit_bias": {}},
        {"suffix": ""},
        {"echo": False},
        {"tool_choice": "none"},
        {"response_format": {"type": "text"}},
        {"skip_special_tokens": True},
        {"priority": 0},
        {"length_penalty": 1.0},
    ],
)
def test_values_that_ask_for_nothing_are_accepted(empty: dict[str, Any]) -> None:
    """Neutral values of fields, the refused ones included, change nothing."""
    assert [] == completion(**empty).stop
    assert [] == chat(**empty).stop


def test_fields_of_load_tools_and_agents_are_accepted() -> None:
    """Harmless, unknown and extra fields give a request; unknown ones are reported."""
    body = {
        "stream": True,
        "stream_options": {
            "include_usage": True,
            "continuous_usage_stats": True,
            "include_obfuscation": False,
        },
        "max_tokens": 16,
        "max_completion_tokens": 16,
        "stop": None,
        "ignore_eos": True,
        "user": "u1",
        "metadata": {"a": "b"},
        "store": False,
        "service_tier": "auto",
        "x_unknown": 1,
        "y" * 100: 1,
    }
    request = completion(**body)

    assert (True, 16, True) == (request.ignore_eos, request.asked_tokens, request.stream)
    assert ("x_unknown", "y" * 64) == request.unknown
    assert ("x_unknown", "y" * 64) == chat(**body, parallel_tool_calls=True).unknown


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("prompt", None),
        ("prompt", ""),
        ("prompt", []),
        ("prompt", 5),
        ("prompt", {"text": "x"}),
        ("prompt", ["a", 1]),
        ("prompt", [True]),
        ("prompt", [1.5]),
        ("prompt", ["a"] * 4),
        ("prompt[0]", [[]]),
        ("prompt[0]", [""]),
        ("prompt[1]", ["hello", ""]),
        ("prompt[1]", [[1], ["1"]]),
        ("logprobs", True),
        ("logprobs", -1),
        ("logprobs", 21),
        ("best_of", 0),
        ("best_of", 5),
        ("suffix", 3),
        ("echo", "yes"),
        ("max_tokens", -1),
        ("truncate_prompt_tokens", -2),
        ("prompt_logprobs", 1),
    ],
)
def test_wrong_completion_fields_are_named(field: str, value: Any) -> None:
    """A 400 names the field at fault."""
    with pytest.raises(InvalidRequest) as caught:
        completion(**{field.partition("[")[0]: value})
    assert (field, True) == (caught.value.param, field in caught.value.message)


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("temperature", "1"),
        ("temperature", True),
        ("temperature", -0.1),
        ("temperature", 2.1),
        ("top_p", 1.1),
        ("top_k", -2),
        ("top_k", 1.5),
        ("min_p", -1),
        ("repetition_penalty", 0),
        ("presence_penalty", 2.5),
        ("frequency_penalty", "0"),
        ("n", 0),
        ("n", 5),
        ("n", "2"),
        ("n", True),
        ("max_tokens", -1),
        ("max_tokens", 1.5),
        ("max_completion_tokens", "10"),
        ("min_tokens", -1),
        ("seed", "x"),
        ("seed", 2**64),
        ("seed", 1e30),
        ("stop", 5),
        ("stop[1]", ["a", 5]),
        ("stop_token_ids[0]", ["151645"]),
        ("stop_token_ids", 5),
        ("logit_bias", [1]),
        ("logit_bias", {"x": 1}),
        ("logit_bias", {"": 1}),
        ("logit_bias", {"05": 1}),
        ("logit_bias", {"00": 1}),
        ("logit_bias", {" 5": 1}),
        ("logit_bias", {"5\n": 1}),
        ("logit_bias", {"+5": 1}),
        ("logit_bias", {"-5": 1}),
        ("logit_bias", {"5_0": 1}),
        ("logit_bias", {"5.0": 1}),
        ("logit_bias", {"\u0665": 1}),
        ("logit_bias", {"9" * 5000: 1}),
        ("logit_bias", {str(i): 1 for i in range(1025)}),
        ("logit_bias[5]", {"5": 101}),
        ("logit_bias[5]", {"5": "1"}),
        ("stream", "true"),
        ("stream", 1),
        ("stream_options", {"include_usage": True}),
        ("stream_options", True),
        ("ignore_eos", 1),
        ("model", 5),
        ("include_stop_str_in_output", 1),
        ("skip_special_tokens", "no"),
        ("use_beam_search", True),
    ],
)
def test_wrong_shared_fields_are_named(field: str, value: Any) -> None:
    """Both endpoints refuse wrong values of the fields they share, and name them."""
    for parse in (completion, chat):
        with pytest.raises(InvalidRequest) as caught:
            parse(**{field.partition("[")[0]: value})
        assert (field, True) == (caught.value.param, field in caught.value.message)


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("max_tokens", {"max_tokens": 0}),
        ("echo", {"echo": True}),
        ("suffix", {"suffix": "x"}),
        ("best_of", {"best_of": 3}),
        ("top_logprobs", {"top_logprobs": 3}),
        ("top_logprobs", {"logprobs": True, "top_logprobs": 21}),
        ("logprobs", {"logprobs": 1}),
        ("tool_choice", {"tool_choice": "required"}),
        ("functions", {"functions": [{}]}),
        ("chat_template", {"chat_template": "{{ 1 }}"}),
        ("chat_template_kwargs", {"chat_template_kwargs": {"messages": []}}),
        ("continue_final_message", {"continue_final_message": True}),
        (
            "continue_final_message",
            {
                "messages": [*HI, {"role": "assistant", "content": "x"}],
                "continue_final_message": True,
                "add_generation_prompt": True,
            },
        ),
    ],
)
def test_wrong_chat_fields_are_named(field: str, body: dict[str, Any]) -> None:
    """A 400 names the field at fault."""
    with pytest.raises(InvalidRequest) as caught:
        chat(**body)
    assert field == caught.value.param


def test_accepted_limits() -> None:
    """The edges of what is allowed are allowed."""
    edges = completion(
        n=4, temperature=2, top_p=0, top_k=-1, seed=-(2**63), logprobs=0, logit_bias={"5": -100}, best_of=4
    )

    assert (4, -1, 0, {5: -100.0}) == (edges.n, edges.top_k, edges.num_logprobs, edges.logit_bias)
    assert 20 == chat(logprobs=True, top_logprobs=20).num_logprobs
    assert 0 == chat(logprobs=True, top_logprobs=0).num_logprobs
    assert chat(top_logprobs=0).num_logprobs is None
    assert 1e-9 == completion(temperature=1e-9).temperature


def test_the_smaller_of_two_lengths_wins() -> None:
    """max_completion_tokens works on both endpoints, alone and beside max_tokens."""
    assert 10 == chat(max_completion_tokens=10).asked_tokens
    assert 10 == completion(max_tokens=20, max_completion_tokens=10).asked_tokens
    assert completion().asked_tokens is None
    with pytest.raises(InvalidRequest) as caught:
        completion(max_tokens=2, min_tokens=3)
    assert "min_tokens" == caught.value.param


def test_the_four_prompt_forms() -> None:
    """Text, texts, ids and lists of ids become a list of prompts."""
    assert ["a"] == completion(prompt="a").prompt
    assert ["a", "b"] == completion(prompt=["a", "b"]).prompt
    assert [[1, 2]] == completion(prompt=[1, 2]).prompt
    assert [[1, 2], [3]] == completion(prompt=[[1, 2], [3]]).prompt


def test_choices_in_all_are_bounded() -> None:
    """n times the number of prompts has its own limit."""
    with pytest.raises(InvalidRequest) as caught:
        completion(prompt=["a", "b"], n=4)
    assert "n" == caught.value.param


def test_error_texts_are_plain() -> None:
    """No pydantic wording, no value of the caller, one sentence."""
    with pytest.raises(InvalidRequest) as caught:
        completion(temperature="hot" * 1000)
    assert "temperature should be a valid number" == caught.value.message


@pytest.mark.parametrize(
    ("params", "table"),
    [
        (completion_types.completion_create_params, COMPLETION_FIELDS),
        (chat_types.completion_create_params, CHAT_FIELDS),
    ],
)
def test_every_field_of_the_client_library_is_in_the_table(params: Any, table: Any) -> None:
    """What the openai package can send is supported, ignored on purpose, or refused by name."""
    known = {field.name for field in table}

    assert set() == set(params.CompletionCreateParamsBase.__annotations__) - known
    assert len(known) == len(table)


@pytest.mark.parametrize(
    ("cls", "table"), [(CompletionRequest, COMPLETION_FIELDS), (ChatRequest, CHAT_FIELDS)]
)
def test_the_table_tells_what_the_parser_reads(cls: Any, table: Any) -> None:
    """Supported fields are exactly those of the request class."""
    assert set(cls.model_fields) - {"unknown"} == {f.name for f in table if f.status == "supported"}


JSON = st.recursive(
    st.none()
    | st.booleans()
    | st.integers(-(2**63), 2**64 - 1)
    | st.floats(allow_nan=False)
    | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=8,
)


@settings(deadline=None, max_examples=100)
@given(
    body=st.dictionaries(
        st.sampled_from([f.name for f in (*COMPLETION_FIELDS, *CHAT_FIELDS)]), JSON, max_size=4
    )
)
def test_any_json_is_a_request_or_a_client_error(body: dict[str, Any]) -> None:
    """No value of any field raises anything but InvalidRequest."""
    for parse in (completion, chat):
        with suppress(InvalidRequest):
            parse(**body)


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("best_of", {"n": 2, "best_of": 1}),
        ("best_of", {"best_of": 3, "stream": True}),
        ("n", {"prompt": ["a"] * 3, "best_of": 4}),
        ("suffix", {"suffix": "x", "echo": True}),
    ],
)
def test_completion_fields_that_exclude_each_other(field: str, body: dict[str, Any]) -> None:
    """What can never be answered is a 400 at once."""
    with pytest.raises(InvalidRequest) as caught:
        completion(**body)
    assert field == caught.value.param


def test_best_of_equal_to_n_is_what_old_clients_send() -> None:
    """It asks for nothing, streamed or not."""
    assert 2 == completion(n=2, best_of=2, stream=True).num_samples
    assert 3 == completion(best_of=3).num_samples

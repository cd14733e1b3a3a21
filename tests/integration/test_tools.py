"""Tool calls over real sockets: enforced, streamed in the API's shapes, the same in both modes."""

from __future__ import annotations

import json
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from pydantic import BaseModel

from router.text.tokenizer import TextTokenizer
from tests.support.cluster import Cluster

HI: list[dict[str, Any]] = [{"role": "user", "content": "What is the weather in Rome and in Oslo?"}]
WEATHER: dict[str, Any] = {
    "type": "object",
    "properties": {"city": {"enum": ["Rome", "Oslo"]}, "days": {"enum": [1, 2, 3]}},
    "required": ["city", "days"],
    "additionalProperties": False,
}
TIME: dict[str, Any] = {
    "type": "object",
    "properties": {"zone": {"type": "string", "maxLength": 4}},
    "required": ["zone"],
    "additionalProperties": False,
}
PARAMETERS = {"get_weather": WEATHER, "get-time": TIME}
TOOLS = [
    {"type": "function", "function": {"name": "get_weather", "description": "w", "parameters": WEATHER}},
    {"type": "function", "function": {"name": "get-time", "parameters": TIME, "strict": True}},
]
NAMED = {"type": "function", "function": {"name": "get-time"}}
SAMPLING: dict[str, Any] = {"temperature": 1.0, "repetition_penalty": 1.0, "top_p": 1, "top_k": -1}


class _Weather(BaseModel):
    """A tool's arguments, as the client library is told them."""

    city: Literal["Rome", "Oslo"]


@pytest.fixture(scope="module")
def open_id(tiny_model: Any) -> int:
    """The token that opens a call."""
    return TextTokenizer.load(tiny_model).control_ids["<tool_call>"]


def body(**fields: Any) -> dict[str, Any]:
    """A request with both tools."""
    return {"model": "tiny", "messages": HI, "tools": TOOLS, "max_tokens": 300, **SAMPLING} | fields


def whole(cluster: Cluster, **fields: Any) -> ChatCompletion:
    """The answer in one piece."""
    response = httpx.post(f"{cluster.url}/v1/chat/completions", json=body(**fields), timeout=60)
    assert response.status_code == 200, response.text
    return ChatCompletion.model_validate(response.json())


def stream(cluster: Cluster, **fields: Any) -> list[ChatCompletionChunk]:
    """The answer's events."""
    response = httpx.post(f"{cluster.url}/v1/chat/completions", json=body(stream=True, **fields), timeout=60)
    lines = [line for line in response.text.splitlines() if line.startswith("data: {")]
    return [ChatCompletionChunk.model_validate(json.loads(line[6:])) for line in lines]


def joined(chunks: list[ChatCompletionChunk]) -> tuple[str, list[tuple[str, str]], str]:
    """Content, calls and ending of a stream, after a look at every event's shape."""
    content, ending = "", ""
    calls: list[list[str]] = []
    ids: list[str] = []
    for choice in (chunk.choices[0] for chunk in chunks if chunk.choices):
        content += choice.delta.content or ""
        ending = choice.finish_reason or ending
        for call in choice.delta.tool_calls or []:
            given = call.model_dump(exclude_unset=True)
            if call.id is not None:
                assert {"index", "id", "type", "function"} == set(given)
                assert ("function", "") == (call.type, given["function"]["arguments"])
                assert call.index == len(calls)
                ids.append(call.id)
                calls.append([given["function"]["name"], ""])
            else:
                assert {
                    "index": call.index,
                    "function": {"arguments": given["function"]["arguments"]},
                } == given
                assert call.index == len(calls) - 1
                calls[call.index][1] += given["function"]["arguments"]
    assert len(set(ids)) == len(ids)
    return content, [(name, arguments) for name, arguments in calls], ending


def calls_of(answer: ChatCompletion) -> list[tuple[str, str]]:
    """Names and arguments."""
    calls = answer.choices[0].message.tool_calls or []
    return [(c.function.name, c.function.arguments) for c in calls if c.type == "function"]


def check(calls: list[tuple[str, str]]) -> None:
    """Every call is of a tool, with arguments that its schema allows."""
    for name, arguments in calls:
        jsonschema.validate(json.loads(arguments), PARAMETERS[name])


@pytest.mark.parametrize("call_open", [True, False])
@pytest.mark.parametrize("choice", ["auto", "required", "none", NAMED], ids=str)
def test_calls_and_endings_agree_in_both_modes(
    pd: Cluster, open_id: int, choice: Any, call_open: bool
) -> None:
    """ "tool_calls" exactly when there is a call; none never has one, required and named always have."""
    bias = {str(open_id): 100.0 if call_open else -100.0}
    fields: dict[str, Any] = {
        "tool_choice": choice,
        "seed": 5,
        "logit_bias": bias,
        "parallel_tool_calls": False,
    }

    answer = whole(pd, **fields)
    content, calls, ending = joined(stream(pd, **fields))

    assert calls_of(answer) == calls
    assert (answer.choices[0].message.content or "") == content
    assert answer.choices[0].finish_reason == ending
    assert bool(calls) == (ending == "tool_calls")
    assert bool(calls) == (choice in ("required", NAMED) or (choice == "auto" and call_open))
    check(calls)
    if choice == NAMED:
        assert ["get-time"] == [name for name, _ in calls]


@pytest.mark.parametrize("seed", range(4))
def test_several_calls_have_indices_and_ids_of_their_own(pd: Cluster, open_id: int, seed: int) -> None:
    """A model that likes to call goes on until it is cut; whole calls are right all the same."""
    fields: dict[str, Any] = {"tool_choice": "required", "seed": seed, "logit_bias": {str(open_id): 100.0}}

    _, calls, ending = joined(stream(pd, max_tokens=200, **fields))

    check(calls[:-1])
    if ending == "tool_calls":
        check(calls)
    else:
        assert "length" == ending


def test_one_call_is_the_most_without_parallel_calls(pd: Cluster) -> None:
    """parallel_tool_calls false."""
    for seed in range(6):
        answer = whole(pd, tool_choice="required", parallel_tool_calls=False, seed=seed)
        assert 1 == len(calls_of(answer))
        assert "tool_calls" == answer.choices[0].finish_reason


def test_logprobs_stay_one_per_token(pd: Cluster) -> None:
    """Also of the tokens that are no content, in both modes."""
    fields: dict[str, Any] = {"tool_choice": "required", "parallel_tool_calls": False, "seed": 1}
    fields |= {"logprobs": True, "top_logprobs": 1}

    answer = whole(pd, **fields)
    chunks = stream(pd, stream_options={"include_usage": True}, **fields)

    entries = [e for c in chunks for ch in c.choices if ch.logprobs for e in ch.logprobs.content or []]
    assert answer.usage
    assert answer.choices[0].logprobs
    assert answer.usage.completion_tokens - 1 == len(answer.choices[0].logprobs.content or [])
    assert answer.choices[0].logprobs.content == entries


def test_token_ids_are_all_told(pd: Cluster) -> None:
    """return_token_ids with calls: every id once, in both modes."""
    fields: dict[str, Any] = {
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "seed": 1,
        "return_token_ids": True,
    }

    answer = whole(pd, **fields).choices[0].model_dump()["token_ids"]
    chunks = [ch.model_dump() for c in stream(pd, **fields) for ch in c.choices]

    assert answer == [token for choice in chunks for token in choice.get("token_ids") or []]


def test_pd_and_unified_call_alike(pd: Cluster, unified: Cluster) -> None:
    """Name and arguments are drawn the same wherever."""
    for seed in range(3):
        fields: dict[str, Any] = {"tool_choice": "required", "seed": seed, "parallel_tool_calls": False}
        assert calls_of(whole(pd, **fields)) == calls_of(whole(unified, **fields))


def test_tools_and_history_are_in_the_prompt(pd: Cluster) -> None:
    """Tools make the prompt longer; with tool_choice none they are not there."""
    history = [
        *HI,
        {
            "role": "assistant",
            "content": None,
            "tool_calls": [
                {
                    "id": "call_1",
                    "type": "function",
                    "function": {"name": "get_weather", "arguments": '{"city": "Rome", "days": 1}'},
                }
            ],
        },
        {"role": "tool", "tool_call_id": "call_1", "content": "12 degrees"},
    ]
    bodies: list[dict[str, Any]] = [{"tool_choice": "none"}, {"tools": []}, {}, {"messages": history}]
    lengths = [
        (whole(pd, max_tokens=1, **fields).usage or pytest.fail("no usage")).prompt_tokens
        for fields in bodies
    ]

    assert lengths[0] == lengths[1] < lengths[2] < lengths[3]


def test_a_format_and_tools_together_give_one_or_the_other(pd: Cluster, open_id: int) -> None:
    """Calls if the model opens one, else the format."""
    schema = {"type": "json_schema", "json_schema": {"name": "x", "schema": {"enum": [1, 2]}}}
    for bias in (100.0, -100.0):
        answer = whole(
            pd, response_format=schema, logit_bias={str(open_id): bias}, parallel_tool_calls=False, seed=2
        )
        calls, content = calls_of(answer), answer.choices[0].message.content
        check(calls)
        assert (1, None) == (len(calls), content) if bias > 0 else content in ("1", "2")


def test_the_client_library_puts_the_calls_together(pd: Cluster) -> None:
    """Whole and streamed, with its own accumulator."""
    client = openai.OpenAI(base_url=f"{pd.url}/v1", api_key="x", max_retries=0)
    arguments: dict[str, Any] = {
        "model": "tiny",
        "messages": HI,
        "tools": [openai.pydantic_function_tool(_Weather, name="get_weather")],
        "tool_choice": "required",
        "parallel_tool_calls": False,
        "seed": 8,
        "max_tokens": 300,
    }

    parsed = client.chat.completions.parse(**arguments)
    with client.chat.completions.stream(**arguments) as events:
        streamed = events.get_final_completion()

    for answer in (parsed, streamed):
        calls = answer.choices[0].message.tool_calls
        assert calls
        assert isinstance(calls[0].function.parsed_arguments, _Weather)
    assert parsed.choices[0].message.tool_calls
    assert streamed.choices[0].message.tool_calls
    assert (
        parsed.choices[0].message.tool_calls[0].function.arguments
        == streamed.choices[0].message.tool_calls[0].function.arguments
    )


def test_nothing_is_left_behind(pd: Cluster) -> None:
    """After all of the above."""
    whole(pd, tool_choice="required", parallel_tool_calls=False)
    pd.check_nothing_left()

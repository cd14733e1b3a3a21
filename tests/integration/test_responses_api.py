"""/v1/responses: the same answers as chat, in objects and events that the openai package's own types accept."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import TypeAdapter

from router.text.tokenizer import TextTokenizer
from tests.integration.test_bad_input import check_error
from tests.support.cluster import Cluster

BAD_SCHEMA = {"type": "object", "properties": {"x": {"type": "no such type"}}}
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"repetition_penalty": 1.0}}
INPUT: list[Any] = [
    {"role": "developer", "content": "Be short."},
    {
        "role": "user",
        "content": [{"type": "input_text", "text": "hi "}, {"type": "input_text", "text": "there"}],
    },
    {"type": "message", "role": "assistant", "content": [{"type": "output_text", "text": "Hello."}]},
    {"type": "reasoning", "id": "rs_1", "summary": []},
    {"type": "function_call", "call_id": "c1", "name": "f", "arguments": '{"x": 1}'},
    {"type": "function_call_output", "call_id": "c1", "output": "7"},
    {"role": "user", "content": "and?"},
]
CHAT: list[dict[str, Any]] = [
    {"role": "system", "content": "Be short."},
    {"role": "user", "content": "hi there"},
    {"role": "assistant", "content": "Hello."},
    {
        "role": "assistant",
        "content": None,
        "tool_calls": [{"id": "c1", "type": "function", "function": {"name": "f", "arguments": '{"x": 1}'}}],
    },
    {"role": "tool", "tool_call_id": "c1", "content": "7"},
    {"role": "user", "content": "and?"},
]


@pytest.fixture(scope="module")
def client(pd: Cluster) -> Iterator[openai.OpenAI]:
    """The openai package, without second tries."""
    url = f"{pd.url}/v1"
    with openai.OpenAI(
        base_url=url, api_key="any", max_retries=0, _strict_response_validation=True
    ) as opened:
        yield opened


def test_it_answers_what_chat_answers(client: openai.OpenAI) -> None:
    """Text as input, instructions, counts and the reason of an early end."""
    response = client.responses.create(
        model="tiny", input="hi", instructions="Be short.", max_output_tokens=6, **GREEDY
    )
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "system", "content": "Be short."}, {"role": "user", "content": "hi"}],
        max_tokens=6,
        **GREEDY,
    )

    assert chat.choices[0].message.content == response.output_text
    assert chat.usage is not None
    assert response.usage is not None
    assert (chat.usage.prompt_tokens, 6) == (response.usage.input_tokens, response.usage.output_tokens)
    assert response.incomplete_details is not None
    assert ("incomplete", "max_output_tokens") == (response.status, response.incomplete_details.reason)
    assert ("Be short.", 0.0, False) == (
        response.instructions,
        response.temperature,
        response.to_dict()["store"],
    )


def test_an_answer_that_ends_by_itself_is_complete(client: openai.OpenAI, tiny_model: Path) -> None:
    """At an end token."""
    end = TextTokenizer.load(tiny_model).control_ids["<|im_end|>"]
    response = client.responses.create(model="tiny", input="hi", extra_body={"logit_bias": {end: 100}})

    assert ("completed", "", None) == (response.status, response.output_text, response.incomplete_details)


def test_every_kind_of_input_item_becomes_its_message(client: openai.OpenAI) -> None:
    """Roles, parts, calls and their outputs; reasoning is left out."""
    response = client.responses.create(model="tiny", input=INPUT, max_output_tokens=6, **GREEDY)
    chat: Any = client.chat.completions.create(model="tiny", messages=CHAT, max_tokens=6, **GREEDY)  # type: ignore[arg-type]

    assert response.usage is not None
    assert chat.usage.prompt_tokens == response.usage.input_tokens
    assert chat.choices[0].message.content == response.output_text


def test_the_stream_is_the_whole_answer_in_typed_events(pd: Cluster, client: openai.OpenAI) -> None:
    """In order, numbered, each of the type that its name says; the last one holds the whole response."""
    body = {"model": "tiny", "input": "hi", "max_output_tokens": 6, "temperature": 0, "stream": True}
    adapter: TypeAdapter[Any] = TypeAdapter(ResponseStreamEvent)
    events = []
    with httpx.stream("POST", f"{pd.url}/v1/responses", json=body, timeout=60) as stream:
        name = ""
        for line in stream.iter_lines():
            if line.startswith("event: "):
                name = line.removeprefix("event: ")
            elif line.startswith("data: "):
                event = adapter.validate_python(json.loads(line.removeprefix("data: ")))
                assert name == event.type
                events.append(event)
    whole = client.responses.create(model="tiny", input="hi", max_output_tokens=6, temperature=0)

    assert list(range(len(events))) == [event.sequence_number for event in events]
    kinds = [event.type for event in events]
    assert [
        "response.created",
        "response.in_progress",
        "response.output_item.added",
        "response.content_part.added",
        "response.output_text.delta",
    ] == kinds[:5]
    assert [
        "response.output_text.done",
        "response.content_part.done",
        "response.output_item.done",
        "response.incomplete",
    ] == kinds[-4:]
    deltas = [event.delta for event in events if event.type == "response.output_text.delta"]
    assert whole.output_text == "".join(deltas) == events[-4].text == events[-1].response.output_text
    assert whole.usage == events[-1].response.usage
    assert isinstance(events[-1].response, Response)


def test_the_stream_helper_of_the_package_follows(client: openai.OpenAI) -> None:
    """It keeps its own account of the events, and wants them complete."""
    with client.responses.stream(model="tiny", input="hi", max_output_tokens=6) as stream:
        text = "".join(event.delta for event in stream if event.type == "response.output_text.delta")

    assert text


TOOL: dict[str, Any] = {
    "type": "function",
    "name": "get_weather",
    "description": "Weather of a city",
    "parameters": {
        "type": "object",
        "properties": {"city": {"enum": ["Rome", "Oslo"]}},
        "required": ["city"],
        "additionalProperties": False,
    },
    "strict": True,
}


@pytest.mark.parametrize("choice", ["required", {"type": "function", "name": "get_weather"}])
def test_functions_are_called_whole_and_streamed(client: openai.OpenAI, choice: Any) -> None:
    """A forced call is an item with valid arguments, which a next turn can answer."""
    fields: dict[str, Any] = {
        "model": "tiny",
        "tools": [TOOL],
        "tool_choice": choice,
        "parallel_tool_calls": False,
    }
    response = client.responses.create(input="Weather in Rome?", temperature=0, **fields)
    with client.responses.stream(input="Weather in Rome?", temperature=0, **fields) as stream:
        kinds = [event.type for event in stream]
        streamed = stream.get_final_response()

    (call,) = response.output
    assert call.type == "function_call"
    assert json.loads(call.arguments)["city"] in ("Rome", "Oslo")
    assert ("get_weather", "completed", "completed") == (call.name, call.status, response.status)
    assert "response.function_call_arguments.done" in kinds
    (again,) = streamed.output
    assert again.type == "function_call"
    assert (call.name, call.arguments) == (again.name, again.arguments)
    answered = client.responses.create(
        model="tiny",
        tools=[TOOL],  # type: ignore[list-item]
        max_output_tokens=4,
        input=[
            {"role": "user", "content": "Weather in Rome?"},
            {
                "type": "function_call",
                "call_id": call.call_id,
                "name": call.name,
                "arguments": call.arguments,
            },
            {"type": "function_call_output", "call_id": call.call_id, "output": "sunny"},
        ],
    )
    assert answered.usage is not None
    assert answered.usage.output_tokens


def test_text_can_be_held_to_a_schema(client: openai.OpenAI) -> None:
    """text.format is chat's response_format."""
    schema = {
        "type": "object",
        "properties": {"n": {"enum": [1, 2]}},
        "required": ["n"],
        "additionalProperties": False,
    }
    response = client.responses.create(
        model="tiny",
        input="A number",
        text={"format": {"type": "json_schema", "name": "number", "schema": schema, "strict": True}},
    )

    assert json.loads(response.output_text) in ({"n": 1}, {"n": 2})


@pytest.mark.parametrize(
    ("param", "body"),
    [
        ("tools[0].type", {"tools": [{"type": "web_search"}]}),
        ("tools[0].name", {"tools": [{"type": "function", "name": ""}]}),
        ("tool_choice", {"tools": [TOOL], "tool_choice": {"type": "function", "name": "other"}}),
        ("input", {}),
        ("input", {"input": []}),
        ("input", {"input": None}),
        ("input", {"input": 5}),
        ("input[0]", {"input": ["x"]}),
        ("input[0].type", {"input": [{"type": "item_reference", "id": "x"}]}),
        ("input", {"input": [{"role": "wizard", "content": "x"}]}),
        ("input", {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": "x"}]}]}),
        ("instructions", {"instructions": 5}),
        ("previous_response_id", {"previous_response_id": "resp_1"}),
        ("conversation", {"conversation": "conv_1"}),
        ("background", {"background": True}),
        ("truncation", {"truncation": "auto"}),
        ("include", {"include": "message.output_text.logprobs"}),
        ("top_logprobs", {"top_logprobs": 21}),
        ("max_output_tokens", {"max_output_tokens": 0}),
        ("input", {"max_output_tokens": 5000}),
        ("min_tokens", {"max_output_tokens": 2, "min_tokens": 3}),
        ("stop_token_ids", {"stop_token_ids": [10**6]}),
        (
            "text.format.schema",
            {"text": {"format": {"type": "json_schema", "name": "x", "schema": BAD_SCHEMA}}},
        ),
        ("tools[0].parameters", {"tools": [TOOL | {"parameters": BAD_SCHEMA}]}),
        ("temperature", {"temperature": 9}),
        ("text", {"text": "json"}),
        ("stream", {"stream": 1}),
    ],
)
def test_what_cannot_be_done_is_refused_by_name(pd: Cluster, param: str, body: dict[str, Any]) -> None:
    """A 400 in the one shape; nothing is stored, so earlier responses cannot be named."""
    content = {"input": "hi"} | body if body and "input" not in body else body
    response = httpx.post(f"{pd.url}/v1/responses", json=content)

    check_error(response, 400)
    error = response.json()["error"]
    assert param == error["param"], response.text
    words = set(re.findall(r"[\w.]+", error["message"]))
    assert not words & {
        "messages",
        "max_tokens",
        "max_completion_tokens",
        "response_format",
        "tools[0].function",
    }


def test_too_long_an_input_says_what_clients_search_for(pd: Cluster) -> None:
    """As on the other endpoints, whether it was tokenised or not, about the field that this endpoint has."""
    for text in ("hi " * 9000, "1" * 9000):
        response = httpx.post(f"{pd.url}/v1/responses", json={"input": text})

        check_error(response, 400)
        error = response.json()["error"]
        assert "maximum context length is 4096 tokens" in error["message"]
        assert ("input", "context_length_exceeded") == (error["param"], error["code"])
        assert "messages" not in error["message"]


@pytest.mark.parametrize(
    ("fields", "num_best"),
    [
        ({"include": ["message.output_text.logprobs"]}, 0),
        ({"include": ["message.output_text.logprobs"], "top_logprobs": 2}, 2),
        ({"top_logprobs": 3}, 3),
    ],
)
def test_logprobs_are_those_of_chat(client: openai.OpenAI, fields: dict[str, Any], num_best: int) -> None:
    """Beside the text that they belong to: in the whole answer, in each delta, and once more at the end."""
    ask: dict[str, Any] = {"model": "tiny", "input": "hi", "max_output_tokens": 12, **GREEDY, **fields}
    chat = client.chat.completions.create(
        model="tiny",
        messages=[{"role": "user", "content": "hi"}],
        max_tokens=12,
        logprobs=True,
        top_logprobs=num_best,
        **GREEDY,
    )
    response = client.responses.create(**ask)
    events = list(client.responses.create(stream=True, **ask))

    assert chat.choices[0].logprobs is not None
    expected = [entry.model_dump() for entry in chat.choices[0].logprobs.content or []]
    (message,) = response.output
    assert message.type == "message"
    (part,) = message.content
    assert part.type == "output_text"
    found = [entry.model_dump() for entry in part.logprobs or []]
    assert expected[: len(found)] == found
    spelled = bytes(byte for entry in found for byte in entry["bytes"])
    assert spelled.decode(errors="replace").startswith(part.text)
    assert {num_best} == {len(entry["top_logprobs"]) for entry in found}
    streamed = [event for event in events if event.type == "response.output_text.delta"]
    deltas = [entry.model_dump() for event in streamed for entry in event.logprobs]
    (done,) = [event for event in events if event.type == "response.output_text.done"]
    assert deltas == [entry.model_dump() for entry in done.logprobs]
    assert [(e["token"], e["logprob"]) for e in found] == [(e["token"], e["logprob"]) for e in deltas]


def test_without_asking_there_are_no_logprobs(client: openai.OpenAI) -> None:
    """Other things to include do not exist, and cost nothing."""
    response = client.responses.create(
        model="tiny", input="hi", max_output_tokens=4, include=["reasoning.encrypted_content"], **GREEDY
    )
    (message,) = response.output
    assert message.type == "message"
    assert [[]] == [part.logprobs for part in message.content if part.type == "output_text"]

"""langchain-openai: streams, batches, bound tools, structured output, and an agent loop of two calls."""

from __future__ import annotations

from typing import Any, Literal

import pytest
from pydantic import BaseModel, SecretStr

from tests.support.cluster import Cluster

pytestmark = pytest.mark.filterwarnings("ignore")
langchain_openai = pytest.importorskip("langchain_openai")
CITIES = ("Rome", "Oslo")


@pytest.fixture(scope="module")
def chat(pd: Cluster) -> Any:
    """A chat model over the router."""
    return langchain_openai.ChatOpenAI(
        model="tiny",
        base_url=f"{pd.url}/v1",
        api_key=SecretStr("any"),
        max_retries=0,
        temperature=0,
        max_tokens=40,
        stream_usage=True,
    )


class Weather(BaseModel):
    """The weather of a city."""

    city: Literal["Rome", "Oslo"]


def test_streamed_chunks_join_to_the_whole_answer(chat: Any) -> None:
    """With usage."""
    whole = chat.invoke("hi")
    joined = None
    for chunk in chat.stream("hi"):
        joined = chunk if joined is None else joined + chunk

    assert joined is not None
    assert whole.content == joined.content
    assert whole.usage_metadata["output_tokens"] == joined.usage_metadata["output_tokens"]


def test_legacy_completions_answer_a_batch(pd: Cluster) -> None:
    """Two prompts in one request, in order."""
    model = langchain_openai.OpenAI(
        model="tiny",
        base_url=f"{pd.url}/v1",
        api_key=SecretStr("any"),
        max_retries=0,
        temperature=0,
        max_tokens=5,
    )

    batch = model.generate(["Once upon", "red"])

    assert [model.invoke("Once upon"), model.invoke("red")] == [g[0].text for g in batch.generations]


def test_bound_tools_are_called_and_answered(chat: Any) -> None:
    """A loop: two calls that must be made, then an answer; streamed pieces merge into the same calls."""
    messages_of = pytest.importorskip("langchain_core.messages")
    forced = chat.bind_tools([Weather], tool_choice="required", parallel_tool_calls=False)
    history: list[Any] = [messages_of.HumanMessage("Weather in Rome and Oslo?")]
    for _ in range(2):
        joined = None
        for chunk in forced.stream(history):
            joined = chunk if joined is None else joined + chunk
        assert joined is not None
        (call,) = joined.tool_calls
        assert "Weather" == call["name"]
        assert call["args"]["city"] in CITIES
        history += [joined, messages_of.ToolMessage("sunny", tool_call_id=call["id"])]

    answer = chat.bind_tools([Weather], tool_choice="none").invoke(history)

    assert [] == answer.tool_calls
    assert answer.usage_metadata["input_tokens"] > 100


@pytest.mark.parametrize("method", ["json_schema", "function_calling"])
def test_structured_output_is_an_object_of_the_class(chat: Any, method: str) -> None:
    """By either way that langchain knows."""
    found = chat.with_structured_output(Weather, method=method).invoke("Where?")

    assert isinstance(found, Weather)


def test_the_responses_api_serves_it_too(pd: Cluster) -> None:
    """What newer versions choose for some options."""
    model = langchain_openai.ChatOpenAI(
        model="tiny",
        base_url=f"{pd.url}/v1",
        api_key=SecretStr("any"),
        max_retries=0,
        use_responses_api=True,
        temperature=0,
        max_tokens=6,
    )

    whole = model.invoke("hi")
    joined = None
    for chunk in model.stream("hi"):
        joined = chunk if joined is None else joined + chunk

    assert joined is not None
    assert whole.text == joined.text
    assert whole.text

"""The official Python client: chat, its stream helper, legacy completions, raw responses, many at once."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from pydantic import BaseModel

from tests.support.cluster import Cluster
from tests.support.completions import random_prompt

HI: list[Any] = [{"role": "user", "content": "hi"}]
GREEDY: dict[str, Any] = {"temperature": 0, "extra_body": {"repetition_penalty": 1.0}}


@pytest.fixture(scope="module")
def client(pd: Cluster) -> Iterator[openai.OpenAI]:
    """Strict about every field that comes back, and without second tries."""
    url = f"{pd.url}/v1"
    with openai.OpenAI(
        base_url=url, api_key="any", max_retries=0, _strict_response_validation=True
    ) as opened:
        yield opened


def test_a_streamed_chat_is_the_whole_one(client: openai.OpenAI) -> None:
    """With usage in the last chunk, because it was asked for."""
    whole = client.chat.completions.create(model="tiny", messages=HI, max_tokens=8, **GREEDY)
    chunks = list(
        client.chat.completions.create(
            model="tiny",
            messages=HI,
            max_tokens=8,
            stream=True,
            stream_options={"include_usage": True},
            **GREEDY,
        )
    )

    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert whole.choices[0].message.content == text
    assert whole.usage is not None
    assert chunks[-1].usage is not None
    assert ([], whole.usage.total_tokens) == (chunks[-1].choices, chunks[-1].usage.total_tokens)
    assert [None] * (len(chunks) - 1) == [chunk.usage for chunk in chunks[:-1]]
    assert 1 == len({chunk.id for chunk in chunks})


@pytest.mark.parametrize("n", [1, 3])
def test_the_stream_helper_follows(client: openai.OpenAI, n: int) -> None:
    """It raises where a role or an ending is told twice, or a chunk does not fit."""
    with client.chat.completions.stream(
        model="tiny",
        messages=HI,
        stop=[" ", "e", "a"],
        max_tokens=200,
        n=n,
        logprobs=True,
        top_logprobs=2,
        seed=1,
    ) as stream:
        kinds = {event.type for event in stream}
        final = stream.get_final_completion()

    assert {"chunk", "content.delta"} <= kinds
    assert n == len(final.choices)
    for choice in final.choices:
        assert "stop" == choice.finish_reason
        assert choice.logprobs is not None
        assert choice.logprobs.content


class City(BaseModel):
    """What the answer must be."""

    model_config = {"extra": "forbid"}

    capital: bool


def test_parse_gives_the_model_of_the_schema(client: openai.OpenAI) -> None:
    """response_format from a pydantic class, enforced."""
    parsed = client.chat.completions.parse(
        model="tiny", messages=HI, response_format=City, temperature=1, seed=4
    )

    assert isinstance(parsed.choices[0].message.parsed, City)


def test_legacy_completions_score_a_batch_of_ids(client: openai.OpenAI) -> None:
    """Two prompts of ids, n 2, echo, logprobs, no tokens: what evaluation harnesses send.

    NOTE: the package's types have no null for a prompt's first token, which OpenAI's own API answers.
    """
    lenient = openai.OpenAI(base_url=client.base_url, api_key="any", max_retries=0)
    prompts = [random_prompt(5, seed=1), random_prompt(9, seed=2)]
    with lenient:
        scored = lenient.completions.create(
            model="tiny", prompt=prompts, echo=True, logprobs=5, n=2, max_tokens=0
        )

    assert [0, 1, 2, 3] == [choice.index for choice in scored.choices]
    for choice in scored.choices:
        lists = choice.logprobs
        assert lists is not None
        assert lists.tokens is not None
        assert lists.token_logprobs is not None
        assert lists.top_logprobs is not None
        length = len(prompts[choice.index // 2])
        assert [length] * 3 == [len(lists.tokens), len(lists.token_logprobs), len(lists.top_logprobs)]
        assert choice.text == "".join(lists.tokens)
    assert scored.usage is not None
    assert (14, 0) == (scored.usage.prompt_tokens, scored.usage.completion_tokens)


def test_raw_responses_tell_where_the_time_went(client: openai.OpenAI) -> None:
    """Whole and streamed."""
    raw = client.chat.completions.with_raw_response.create(model="tiny", messages=HI, max_tokens=4)
    with client.chat.completions.with_streaming_response.create(
        model="tiny", messages=HI, max_tokens=4, stream=True
    ) as streaming:
        streamed = streaming.headers["server-timing"]
        streaming.read()

    assert "prefill;dur=" in raw.headers["server-timing"]
    assert "decode;dur=" in raw.headers["server-timing"]
    assert "prefill;dur=" in streamed
    assert "pd" == raw.headers["x-handoff-topology"]
    assert raw.parse().choices


def test_errors_are_the_exceptions_that_callers_catch(client: openai.OpenAI) -> None:
    """By status, with code and param."""
    with pytest.raises(openai.BadRequestError) as too_long:
        client.completions.create(model="tiny", prompt=random_prompt(5000, seed=1))
    with pytest.raises(openai.NotFoundError) as unknown:
        client.chat.completions.create(model="other", messages=HI)
    with pytest.raises(openai.BadRequestError) as wrong:
        client.chat.completions.create(model="tiny", messages=HI, top_logprobs=3)
    with pytest.raises(openai.NotFoundError):
        client.embeddings.create(model="tiny", input="x")

    assert "context_length_exceeded" == too_long.value.code
    assert "maximum context length" in too_long.value.message
    assert ("model_not_found", "top_logprobs") == (unknown.value.code, wrong.value.param)


def test_models_are_listed(client: openai.OpenAI) -> None:
    """And found by name."""
    assert ["tiny"] == [model.id for model in client.models.list()]
    assert "tiny" == client.models.retrieve("tiny").id


async def test_fifty_at_once_get_their_own_answers(pd: Cluster, client: openai.OpenAI) -> None:
    """Each what it gets alone; every id is another one."""
    prompts = [random_prompt(8 + i % 7, seed=i) for i in range(50)]
    fields: dict[str, Any] = {"model": "tiny", "max_tokens": 6, **GREEDY}
    async with openai.AsyncOpenAI(base_url=f"{pd.url}/v1", api_key="any", max_retries=0, timeout=60) as many:
        answers = await asyncio.gather(*(many.completions.create(prompt=p, **fields) for p in prompts))

    assert 50 == len({answer.id for answer in answers})
    for index in (0, 17, 49):
        alone = client.completions.create(prompt=prompts[index], **fields)
        assert alone.choices[0].text == answers[index].choices[0].text
    pd.check_nothing_left()

"""What clients see when workers fail: real statuses before the first byte, one error event after it."""

from __future__ import annotations

from typing import Any

import openai
import pytest

from shared.errors import (
    BackendError,
    EngineFault,
    InvalidRequest,
    ManifestMismatch,
    Overloaded,
    PromptTooLong,
    ServingError,
    Unavailable,
)
from shared.wire import Work
from tests.contract.site import PROMPT, SiteMaker


def failing(error: ServingError) -> Any:
    """A hook that raises."""

    async def fail(_: Work) -> None:
        raise error

    return fail


async def read(stream: Any, chunks: list[Any]) -> None:
    """Chunks into the list until the stream ends or raises."""
    async for chunk in stream:
        chunks.append(chunk)  # noqa: PERF401 - a list made at once would be lost with the error


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
async def test_the_official_client_raises_in_the_middle_of_a_stream(site: SiteMaker, endpoint: str) -> None:
    """What came before the failure is there; the failure is an APIError with the worker's own text."""
    async with site() as s:
        s.decodes[0].hooks["token"] = failing(EngineFault("the engine failed"))
        url = str(s.http.base_url).rstrip("/") + "/v1"
        async with openai.AsyncOpenAI(base_url=url, api_key="any", max_retries=0) as client:
            if endpoint == "chat":
                said: Any = [{"role": "user", "content": "hi"}]
                stream: Any = await client.chat.completions.create(
                    model="tiny", messages=said, max_tokens=6, stream=True
                )
            else:
                stream = await client.completions.create(
                    model="tiny", prompt=PROMPT, max_tokens=6, stream=True
                )
            chunks: list[Any] = []
            with pytest.raises(openai.APIError, match="the engine failed"):
                await read(stream, chunks)

        assert chunks
        assert all(chunk.choices[0].finish_reason is None for chunk in chunks)
        await s.quiet()


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("side", ["prefill", "decode"])
@pytest.mark.parametrize(
    ("error", "status", "code"),
    [
        (InvalidRequest("token 7 is odd", param="prompt"), 400, "invalid_request"),
        (PromptTooLong("maximum context length is 9 tokens", param="prompt"), 400, "context_length_exceeded"),
        (Overloaded("no blocks", retry_after_s=4), 429, "overloaded"),
        (Unavailable("draining", retry_after_s=4), 503, "unavailable"),
        (EngineFault("out of order"), 500, "engine_fault"),
    ],
    ids=lambda value: type(value).__name__ if isinstance(value, ServingError) else str(value),
)
async def test_a_workers_error_keeps_status_and_text(
    site: SiteMaker, side: str, error: ServingError, status: int, code: str, stream: bool
) -> None:
    """Of either worker, for streams too: never an empty 200, and no address of ours in the body."""
    async with site() as s:
        worker, point = (s.prefills[0], "received") if side == "prefill" else (s.decodes[0], "reserve")
        worker.hooks[point] = failing(error)

        answer = await s.complete(stream=stream)

        told = answer.json()["error"]
        assert "application/json" == answer.headers["content-type"]
        assert "127.0.0.1" not in answer.text
        if status < 500 or code == "unavailable":
            assert (status, code, error.message) == (answer.status_code, told["code"], told["message"])
        else:
            assert answer.status_code >= 500
        assert ("retry-after" in answer.headers) == (code in ("overloaded", "unavailable"))
        worker.hooks.clear()
        assert 200 == (await s.complete()).status_code
        await s.quiet()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_hand_off_that_fails_each_time_is_a_bad_gateway(site: SiteMaker, stream: bool) -> None:
    """Its inner status means nothing to the client."""
    async with site() as s:
        s.prefills[0].hooks["received"] = failing(ManifestMismatch("another model"))
        s.decodes[0].hooks["reserve"] = failing(BackendError("lost"))

        answer = await s.complete(stream=stream)

        assert answer.status_code in (502, 503)
        assert {"message", "type", "param", "code"} == set(answer.json()["error"])
        await s.quiet()

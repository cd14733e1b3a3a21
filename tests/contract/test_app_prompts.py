"""Requests of several prompts, which different workers serve at once."""

from __future__ import annotations

import asyncio

from shared.wire import Work
from tests.contract.site import PROMPT, SiteMaker


async def test_the_headers_of_a_stream_are_those_of_the_prompt_that_came_first(site: SiteMaker) -> None:
    """Its tokens made the stream begin; the headers once told of the last prompt, which had none yet."""
    async with site(prefill=2, decode=2) as s:
        go = asyncio.Event()
        prefill_of: dict[int, str] = {}

        def hold(name: str, number: int) -> None:
            async def first(work: Work) -> None:
                prefill_of[work.num_prompt_tokens] = name
                if work.num_prompt_tokens == number:
                    await go.wait()

            async def token(_: Work) -> None:
                await go.wait()

            s.prefills[int(name[-1])].hooks["first"] = first
            s.decodes[int(name[-1])].hooks["token"] = token

        for slow in (5, 20):
            go.clear()
            for worker in s.prefills:
                hold(worker.name, slow)
            body = {"prompt": [PROMPT, PROMPT[:5]], "max_tokens": 3, "stream": True}
            async with s.http.stream("POST", "/v1/completions", json=body) as answer:
                assert prefill_of[25 - slow] == answer.headers["x-handoff-prefill-worker"]
                assert "prefill;dur" in answer.headers["server-timing"]
                go.set()
                await answer.aread()
        await s.quiet()

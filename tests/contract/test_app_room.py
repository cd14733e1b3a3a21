"""Requests of more prompts than the workers have room for: one after the other, but never without end."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest

from shared.errors import Overloaded, Unavailable
from shared.wire import Work
from tests.contract.fakes import FakeWorker, Hook, token_at
from tests.contract.site import PROMPT, SiteMaker
from tests.contract.test_app import timing

PROMPTS = [PROMPT[: 20 - i] for i in range(6)]


def room_for(
    worker: FakeWorker, number: int, *, enter: str = "reserve", leave: str = "finish"
) -> dict[str, Hook]:
    """Hooks that refuse what enters while `number` others are between these points.

    None leaves before all prompts have been asked for.
    """
    num_inside = 0

    async def come(_: Work) -> None:
        nonlocal num_inside
        if num_inside == number:
            raise Overloaded("no blocks", retry_after_s=4)
        num_inside += 1

    async def go(_: Work) -> None:
        nonlocal num_inside
        await worker.until(lambda w: len(w.requests) >= len(PROMPTS))
        num_inside -= 1

    return {enter: come, leave: go}


async def stay(_: Work) -> None:
    """A hook that nothing gets past."""
    await asyncio.Event().wait()


@pytest.mark.parametrize(("prefill", "max_tokens"), [(1, 6), (0, 6), (1, 1)], ids=["pd", "unified", "one"])
async def test_what_finds_no_room_waits_for_its_siblings(
    site: SiteMaker, prefill: int, max_tokens: int
) -> None:
    """Each prompt is answered once and right, and the waits are told as retries."""
    async with site(prefill=prefill) as s:
        worker = s.prefills[0] if max_tokens == 1 else s.decodes[0]
        points = {"enter": "received", "leave": "first"} if max_tokens == 1 else {}
        worker.hooks = room_for(worker, 2, **points)
        answer = await s.complete(prompt=PROMPTS, max_tokens=max_tokens, return_token_ids=True)
        assert 200 == answer.status_code
        expected = [[token_at(0, len(prompt) + i) for i in range(max_tokens)] for prompt in PROMPTS]
        assert expected == [c["token_ids"] for c in answer.json()["choices"]]
        num_asked = len(worker.requests)
        assert num_asked - len(PROMPTS) == int(answer.headers["x-handoff-retries"]) > 0
        assert "retry" in timing(answer.headers["server-timing"])
        assert max(Counter(r.num_prompt_tokens for r in worker.requests).values()) <= len(PROMPTS)
        await s.quiet()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_list_of_which_nothing_runs_is_refused(site: SiteMaker, stream: bool) -> None:
    """The workers are full of others' requests: after one look for each prompt it is a 429 with Retry-After."""
    async with site() as s:
        s.decodes[0].hooks = room_for(s.decodes[0], 0)
        answer = await s.complete(prompt=PROMPTS, stream=stream)
        assert (429, "4", "overloaded") == (
            answer.status_code,
            answer.headers["retry-after"],
            answer.json()["error"]["code"],
        )
        assert len(PROMPTS) == len(s.decodes[0].requests)
        await s.quiet()


async def test_nobody_waits_for_a_worker_that_is_leaving(site: SiteMaker) -> None:
    """503 is no want of room: siblings that end make nothing better, so it ends the request at once."""
    async with site() as s:
        [worker] = s.decodes

        async def reserve(work: Work) -> None:
            if work.num_prompt_tokens == 20:
                await worker.until(lambda w: w.seen["reserved"] == len(PROMPTS) - 1)
                raise Unavailable("the worker is shutting down")

        worker.hooks = {"reserve": reserve, "token": stay}
        answer = await s.complete(prompt=PROMPTS)
        assert (503, "unavailable") == (answer.status_code, answer.json()["error"]["code"])
        await s.quiet()


async def test_the_wait_ends_at_the_deadline(site: SiteMaker) -> None:
    """Those that have room need all of the request's time: 504, as if none had waited."""
    async with site(request_timeout_s=1.0) as s:
        s.decodes[0].hooks = room_for(s.decodes[0], 2) | {"token": stay}
        answer = await s.complete(prompt=PROMPTS)
        assert (504, "deadline_exceeded") == (answer.status_code, answer.json()["error"]["code"])
        assert len(PROMPTS) == len(s.decodes[0].requests)
        await s.quiet()


async def test_a_client_that_leaves_ends_the_wait(site: SiteMaker) -> None:
    """Nothing is asked of the workers any more, and nothing is left."""
    async with site() as s:
        [worker] = s.decodes
        worker.hooks = room_for(worker, 2) | {"token": stay}
        client = asyncio.create_task(s.complete(prompt=PROMPTS))
        await worker.until(lambda w: len(w.requests) == len(PROMPTS) and w.num_live == 2)
        client.cancel()
        await asyncio.wait([client])
        await s.quiet()
        assert len(PROMPTS) == len(worker.requests)
        assert 1 == await s.metric('handoff_requests_total{ending="client_gone",endpoint="completions"}')

"""What workers tell after the last token of an answer: wanted, but never worth more than a short wait."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from shared.errors import EngineFault
from shared.wire import Work
from tests.contract.conftest import ClusterMaker, answer, job
from tests.contract.fakes import Hook, token_at
from tests.contract.site import SiteMaker
from tests.contract.test_app import timing


async def frozen(_: Work) -> None:
    """Never says a word again."""
    await asyncio.Event().wait()


async def failing(_: Work) -> None:
    """Fails some time after everything was ready."""
    await asyncio.sleep(0.1)
    raise EngineFault("the engine failed")


@pytest.mark.parametrize("hook", [frozen, failing])
@pytest.mark.parametrize(
    ("prefill", "role", "point"),
    [(1, "decode", "finish"), (1, "prefill", "sent"), (0, "decode", "finish")],
    ids=["finish", "sent", "unified"],
)
async def test_an_answer_does_not_wait_for_a_worker_that_fails_after_it(
    site: SiteMaker, prefill: int, role: str, point: str, hook: Hook
) -> None:
    """It ends soon after its last token, the wait being in the stages; once it waited for decode's whole limit."""
    async with site(prefill=prefill) as s:
        worker = s.decodes[0] if role == "decode" else s.prefills[0]
        worker.hooks[point] = hook
        async with asyncio.timeout(5):
            told = await s.complete()
        assert s.text(0, 20, 6) == told.json()["choices"][0]["text"]
        stages = timing(told.headers["server-timing"])
        total = stages.pop("total")
        assert 50 > abs(total - sum(stages.values()))  # ms, of the 100 or 1000 that were waited
        await s.quiet()


class Deaf(list[Any]):
    """Forgets what it is told, as a worker does that the word never reached."""

    def append(self, _: Any) -> None:
        return


@pytest.mark.parametrize("prefill", [0, 1])
async def test_choices_that_the_worker_goes_on_with_are_not_waited_for(
    cluster: ClusterMaker, prefill: int
) -> None:
    """Tokens that nobody wants do not prolong the wait; they once did, to the last one that was asked for."""

    async def pace(_: Work) -> None:
        await asyncio.sleep(0.01)

    async with cluster(prefill=prefill) as c:
        c.decodes[0].hooks["token"] = pace
        c.decodes[0].stopped = Deaf()
        seen: list[list[int]] = [[], []]
        async with asyncio.timeout(5), c.dispatcher.relay(job(n=2, max_tokens=4000)) as relay:
            async for tokens in relay:
                for token in tokens:
                    seen[token.choice].append(token.token_id)
                    if len(seen[token.choice]) == 3:
                        relay.stop(token.choice)
        assert [[token_at(choice, 20 + i) for i in range(3)] for choice in range(2)] == seen
        await c.quiet()


async def test_the_last_word_of_prefill_alone_is_not_waited_for(cluster: ClusterMaker) -> None:
    """One token is the whole answer: its leg once stayed open for prefill's limit."""
    async with cluster() as c:
        c.prefills[0].hooks["done"] = frozen
        async with c.dispatcher.relay(job(max_tokens=1)) as relay:
            assert [[token_at(0, 20)]] == await answer(relay)
        await c.quiet()

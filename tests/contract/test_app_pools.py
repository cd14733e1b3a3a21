"""Answers that do not fit into every worker's memory: how long they may be, and who gets them."""

from __future__ import annotations

import pytest

from shared.errors import InvalidRequest, Overloaded
from shared.wire import Work
from tests.contract.fakes import FakeWorker
from tests.contract.site import PROMPT, Site, SiteMaker

SMALL = 4


def shrink(worker: FakeWorker) -> None:
    """Give it a pool of SMALL blocks, and let it refuse what these can never hold, as a real one does."""

    async def refuse(work: Work) -> None:
        if not worker.pool.holds(len(work.token_ids), work.num_choices, work.max_new_tokens):
            raise InvalidRequest("the request needs more KV memory than this worker has", param="max_tokens")

    worker.num_blocks = SMALL
    worker.hooks["reserve"] = refuse


def asked(worker: FakeWorker) -> list[Work]:
    """What it was asked for clients; only what it is to prove itself with ignores end tokens."""
    return [work for work in worker.requests if not work.sampling.ignore_eos]


async def looked_at(s: Site) -> None:
    """The router has been told of every pool."""
    for worker in s.decodes:
        seen = worker.seen["info"]
        await worker.until(lambda w, seen=seen: w.seen["info"] >= seen + 2)  # type: ignore[misc]


@pytest.mark.parametrize("prefill", [0, 1])
async def test_a_length_that_nobody_named_is_what_all_choices_can_get(site: SiteMaker, prefill: int) -> None:
    """It was the rest of the context for each, which n choices never had: a 400 about a field that nobody sent."""
    async with site(prefill=prefill, health_interval_s=0.1) as s:
        shrink(s.decodes[0])
        await looked_at(s)

        answer = await s.complete(max_tokens=None, n=3)

        assert 200 == answer.status_code, answer.text
        (work,) = asked(s.decodes[0])
        # Of 16: a block is left for each, and the copy of the prompt's last one.
        assert 13 == work.sampling.max_tokens
        await s.quiet()


async def test_a_named_length_is_not_cut(site: SiteMaker) -> None:
    """Who asks for more than there is gets told so."""
    async with site(health_interval_s=0.1) as s:
        shrink(s.decodes[0])
        await looked_at(s)

        answer = await s.complete(max_tokens=30, n=3)

        assert (400, "max_tokens") == (answer.status_code, answer.json()["error"]["param"])


@pytest.mark.parametrize("max_tokens", [None, 200])
@pytest.mark.parametrize("prefill", [0, 1])
async def test_only_a_worker_that_can_hold_an_answer_gets_it(
    site: SiteMaker, prefill: int, max_tokens: int | None
) -> None:
    """Placement looked at load alone, so every second request was refused for good by the smaller worker."""
    async with site(prefill=prefill, decode=2, default_max_tokens=200, health_interval_s=0.1) as s:
        shrink(s.decodes[0])
        await looked_at(s)

        for _ in range(4):
            answer = await s.complete(max_tokens=max_tokens, n=3)
            assert 200 == answer.status_code, answer.text

        assert [] == asked(s.decodes[0])
        assert [200] * 4 == [work.sampling.max_tokens for work in asked(s.decodes[1])]
        await s.quiet()


async def test_a_large_worker_without_room_now_is_a_reason_to_come_back(site: SiteMaker) -> None:
    """Not to be refused for good by a smaller one."""

    async def full(_: Work) -> None:
        raise Overloaded("no room now", retry_after_s=1)

    async with site(decode=2, health_interval_s=0.1) as s:
        shrink(s.decodes[0])
        s.decodes[1].hooks["reserve"] = full
        await looked_at(s)

        answer = await s.complete(max_tokens=200, n=3)

        assert 429 == answer.status_code
        assert [] == asked(s.decodes[0])


async def test_what_fits_everywhere_goes_everywhere(site: SiteMaker) -> None:
    """The smaller worker has its share of small requests."""
    async with site(decode=2, health_interval_s=0.1) as s:
        shrink(s.decodes[0])
        await looked_at(s)

        for _ in range(4):
            assert 200 == (await s.complete(prompt=PROMPT[:4])).status_code

        assert [2, 2] == [len(asked(worker)) for worker in s.decodes]

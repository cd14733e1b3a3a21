"""A request's normal way through real sockets: order, stages, counts, and what is left afterwards."""

from __future__ import annotations

import asyncio

import pytest

from shared.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from shared.wire import Work
from tests.contract.conftest import ClusterMaker, answer, both_loops, job
from tests.contract.fakes import END_AT_ONCE, KV_BYTES_PER_TOKEN, token_at


def expected(prompt: int, max_tokens: int, n: int = 1) -> list[list[int]]:
    """What an unbroken answer is."""
    return [[token_at(c, prompt + i) for i in range(max_tokens)] for c in range(n)]


@pytest.mark.parametrize("prefill", [0, 1])
@pytest.mark.parametrize("n", [1, 3])
async def test_answers_every_choice(cluster: ClusterMaker, prefill: int, n: int) -> None:
    """Each choice gets exactly max_tokens tokens, in order, in both topologies."""
    async with cluster(prefill=prefill) as c:
        async with c.dispatcher.relay(job(n=n)) as relay:
            assert expected(20, 6, n) == await answer(relay, n)
            report = relay.report
        await c.quiet()
    assert (20, 3, 6 * n, 0) == (
        report.prompt_tokens,
        report.cached_tokens,
        report.completion_tokens,
        report.retries,
    )
    way = report.way
    if prefill:
        assert ("pd", "prefill-0", "decode-0", "tcp", 20 * KV_BYTES_PER_TOKEN, 0) == (
            way.topology,
            way.prefill_worker,
            way.decode_worker,
            way.transport,
            way.kv_bytes,
            way.prompt_tokens_computed_on_decode,
        )
    else:
        assert ("unified", None, "decode-0", None, 0, 20) == (
            way.topology,
            way.prefill_worker,
            way.decode_worker,
            way.transport,
            way.kv_bytes,
            way.prompt_tokens_computed_on_decode,
        )


async def test_first_token_does_not_wait_for_the_transfer(cluster: ClusterMaker) -> None:
    """The first token is there while prefill has not even begun to send."""
    sending = asyncio.Event()
    async with cluster() as c:

        async def hold(_: Work) -> None:
            await sending.wait()

        c.prefills[0].hooks["send"] = hold
        async with c.dispatcher.relay(job()) as relay:
            assert [token_at(0, 20)] == [t.token_id for t in await anext(relay)]
            assert 0 == c.decodes[0].seen["injected"]
            sending.set()
            assert [expected(20, 6)[0][1:]] == await answer(relay)
        await c.quiet()


async def test_one_token_needs_no_decode(cluster: ClusterMaker) -> None:
    """max_tokens 1 is answered by prefill alone, without a hand-off."""
    async with cluster() as c:
        async with c.dispatcher.relay(job(max_tokens=1, n=2)) as relay:
            assert expected(20, 1, 2) == await answer(relay, 2)
        await c.quiet()
        assert [] == c.decodes[0].requests
        assert [None] == [r.handoff for r in c.prefills[0].requests]  # type: ignore[attr-defined]


async def test_end_at_the_first_token_drops_the_reservation(cluster: ClusterMaker) -> None:
    """When every choice ends at once nothing is sent and the reservation is given back."""
    async with cluster() as c:
        async with c.dispatcher.relay(job(first=END_AT_ONCE)) as relay:
            assert expected(20, 1) == await answer(relay)
        await c.quiet()
        assert 0 == c.decodes[0].seen["injected"] == c.prefills[0].seen["send"]
        assert 1 == c.prefills[0].seen["done"]


@both_loops
@pytest.mark.parametrize("max_tokens", [1, 2, 6])
@pytest.mark.parametrize("last", ["decode", "prefill"])
async def test_connections_are_reused(cluster: ClusterMaker, max_tokens: int, last: str) -> None:
    """Answers that end well leave both connections for the next request, whichever of the workers ends last.

    Prefill's once was thrown away after short answers: its last word was left unread.
    """
    answered = asyncio.Event()
    async with cluster(health_interval_s=60) as c:
        [prefill], [decode] = c.prefills, c.decodes

        async def after_decode(_: Work) -> None:
            await decode.until(lambda w: w.num_live == 0)

        async def after_prefill(_: Work) -> None:
            await prefill.until(lambda w: w.num_live == 0)

        async def after_the_answer(_: Work) -> None:
            await answered.wait()

        if last == "prefill":
            prefill.hooks |= {"sent": after_decode, "done": after_the_answer}
        else:
            decode.hooks["finish"] = after_prefill
        for _ in range(5):
            answered.clear()
            async with c.dispatcher.relay(job(max_tokens=max_tokens)) as relay:
                assert expected(20, max_tokens) == await answer(relay)
            answered.set()
            await c.quiet()
        assert [1, min(max_tokens - 1, 1)] == [len(worker.callers) for worker in c.workers]


async def test_stop_of_one_choice_reaches_the_worker(cluster: ClusterMaker) -> None:
    """A stopped choice is told to decode and its later tokens are dropped, while the others go on."""
    told = asyncio.Event()

    async with cluster() as c:

        async def wait_for_the_stop(_: Work) -> None:
            if c.decodes[0].seen["token"] == 10:
                await told.wait()

        async def stop_comes() -> None:
            await c.decodes[0].until(lambda w: bool(w.stopped))
            told.set()

        c.decodes[0].hooks["token"] = wait_for_the_stop
        waiting = asyncio.create_task(stop_comes())
        relay_seen: list[list[int]] = [[], []]
        async with c.dispatcher.relay(job(n=2, max_tokens=50)) as relay:
            async for tokens in relay:
                for token in tokens:
                    relay_seen[token.choice].append(token.token_id)
                if len(relay_seen[0]) >= 3:
                    relay.stop(0)
        await waiting
        await c.quiet()
        assert expected(20, 50, 2)[1] == relay_seen[1]
        assert 12 > len(relay_seen[0])
        assert (0,) == tuple({choice for s in c.decodes[0].stopped for choice in s.choices})


async def test_no_worker_is_told_at_once(cluster: ClusterMaker) -> None:
    """Without a usable decode worker the answer is 503 with Retry-After, without waiting."""
    async with cluster(health_interval_s=0.05) as c:
        c.decodes[0].draining = True
        while c.registry.decode():
            await c.registry.changed(within_s=5)
        async with c.dispatcher.relay(job()) as relay:
            with pytest.raises(Unavailable) as caught:
                await answer(relay)
        assert caught.value.retry_after_s is not None
        await c.quiet()


async def test_a_full_decode_worker_is_passed_over(cluster: ClusterMaker) -> None:
    """429 from one decode worker sends the request to the other; 429 from both reaches the client."""

    async def full(_: Work) -> None:
        raise Overloaded("no blocks", retry_after_s=7)

    async with cluster(decode=2) as c:
        c.decodes[0].hooks["reserve"] = full
        for _ in range(4):
            async with c.dispatcher.relay(job()) as relay:
                assert expected(20, 6) == await answer(relay)
                assert (0, "decode-1") == (relay.report.retries, relay.report.way.decode_worker)
        c.decodes[1].hooks["reserve"] = full
        async with c.dispatcher.relay(job()) as relay:
            with pytest.raises(Overloaded) as caught:
                await answer(relay)
        assert (429, 7) == (caught.value.http_status, caught.value.retry_after_s)
        await c.quiet()


async def test_a_workers_refusal_keeps_its_class_and_is_not_retried(cluster: ClusterMaker) -> None:
    """A 400 of prefill is the client's 400, with its text, after one try."""

    async def refuse(_: Work) -> None:
        raise InvalidRequest("token id 7 is not in the vocabulary", param="prompt")

    async with cluster(prefill=2) as c:
        for worker in c.prefills:
            worker.hooks["received"] = refuse
        async with c.dispatcher.relay(job()) as relay:
            with pytest.raises(InvalidRequest, match="token id 7") as caught:
                await answer(relay)
        assert "prompt" == caught.value.param
        assert 1 == sum(len(w.requests) for w in c.prefills)
        await c.quiet()


async def test_the_deadline_ends_a_request_and_frees_both_sides(cluster: ClusterMaker) -> None:
    """A request whose time is over is cancelled at both workers, and each was told the time left."""

    async def forever(_: Work) -> None:
        await asyncio.Event().wait()

    async with cluster() as c:
        c.prefills[0].hooks["first"] = forever
        async with c.dispatcher.relay(job(timeout_s=0.3)) as relay:
            with pytest.raises(DeadlineExceeded):
                await answer(relay)
        await c.quiet()
        assert all(0 < r.timeout_s <= 0.3 for w in c.workers for r in w.requests)


async def test_many_streams_at_once(cluster: ClusterMaker) -> None:
    """120 concurrent requests, more than httpx's own default pool, all end right and leave nothing."""
    async with cluster(prefill=2, decode=2) as c:

        async def one() -> list[list[int]]:
            async with c.dispatcher.relay(job(max_tokens=8)) as relay:
                return await answer(relay)

        answers = await asyncio.gather(*(one() for _ in range(120)))
        assert [expected(20, 8)] * 120 == answers
        await c.quiet()
        assert [60, 60] == [len(w.requests) for w in c.decodes]

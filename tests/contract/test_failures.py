"""Every way in which a worker can fail a request, and both ways out: the same tokens later, or one clear error."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable

import pytest

from shared.errors import (
    BackendError,
    BackendTimeout,
    DigestMismatch,
    EngineFault,
    ManifestMismatch,
    Overloaded,
    ReservationGone,
    ServingError,
)
from shared.wire import DecodeRequest, Work
from tests.contract.conftest import Cluster, ClusterMaker, answer, both_loops, job
from tests.contract.fakes import FakeWorker, token_at

PROMPT, MAX_TOKENS = 20, 6


def right(n: int = 1) -> list[list[int]]:
    """What an unbroken answer is."""
    return [[token_at(c, PROMPT + i) for i in range(MAX_TOKENS)] for c in range(n)]


def once(
    worker: FakeWorker, do: Callable[[], Awaitable[None]], *, at: int = 1
) -> Callable[[Work], Awaitable[None]]:
    """A hook that does something the `at`-th time only."""
    times = 0

    async def hook(_: Work) -> None:
        nonlocal times
        times += 1
        if times == at:
            await do()

    return hook


def raising(error: ServingError) -> Callable[[], Awaitable[None]]:
    """What a hook does that reports an error."""

    async def do() -> None:
        raise error

    return do


async def ask(c: Cluster, n: int = 1) -> tuple[list[list[int]], int]:
    """The answer and the number of retries; everything is given back."""
    async with c.dispatcher.relay(job(n=n)) as relay:
        tokens = await answer(relay, n)
    await c.quiet()
    return tokens, relay.report.retries


@pytest.mark.parametrize("point", ["received", "first"])
async def test_prefill_dies_before_the_first_token(cluster: ClusterMaker, point: str) -> None:
    """Another prefill worker takes over under the same reservation."""
    async with cluster(prefill=2) as c:
        victim = c.prefills[0]
        for worker in c.prefills:
            worker.hooks[point] = once(worker, worker.kill)
        c.prefills[1].hooks.clear()
        for _ in range(2):  # one of them is placed on the victim
            assert right() == (await ask(c))[0]
        assert 1 == victim.seen[point]
        assert 2 == len(c.decodes[0].requests)


async def test_prefill_dies_after_the_first_token(cluster: ClusterMaker) -> None:
    """The half-sent KV is given up: a new reservation, and the answer resumes behind the first token."""
    async with cluster(prefill=2) as c:
        for worker in c.prefills:
            worker.hooks["send"] = once(worker, worker.kill)
        c.prefills[1].hooks.clear()
        answers = [await ask(c) for _ in range(2)]
        assert [right()] * 2 == [tokens for tokens, _ in answers]
        assert 1 == sum(retries for _, retries in answers)
        resumed = [r for r in c.decodes[0].requests if len(r.token_ids) > PROMPT]
        assert [[token_at(0, PROMPT)]] == [r.token_ids[PROMPT:] for r in resumed]


@both_loops
@pytest.mark.parametrize("point", ["reserve", "reserved", "injected", "token", "finish"])
@pytest.mark.parametrize("n", [1, 3])
async def test_decode_dies(cluster: ClusterMaker, point: str, n: int) -> None:
    """Another decode worker goes on; with n choices out, each resumes by itself."""
    async with cluster(prefill=1, decode=2) as c:
        for worker in c.decodes:
            worker.hooks[point] = once(worker, worker.kill, at=3 if point == "token" else 1)
        c.decodes[1].hooks.clear()
        answers = [await ask(c, n) for _ in range(2)]
        assert [right(n)] * 2 == [tokens for tokens, _ in answers]
        requests = [r for w in c.decodes for r in w.requests]
        assert len(requests) == len({r.request_id for r in requests if r.request_id != "req-test"}) + 2


@pytest.mark.parametrize(
    "error",
    [
        ManifestMismatch("other tokens"),
        ReservationGone("late"),
        DigestMismatch("damaged"),
        EngineFault("oom"),
    ],
)
@pytest.mark.parametrize("side", ["prefill", "decode"])
async def test_reported_failures_are_tried_again(
    cluster: ClusterMaker, error: ServingError, side: str
) -> None:
    """A hand-off that fails a check, or an engine that fails, costs a try and not the request."""
    async with cluster(prefill=1, decode=1) as c:
        if side == "prefill":
            c.prefills[0].hooks["send"] = once(c.prefills[0], raising(error))
        else:
            c.decodes[0].hooks["injected"] = once(c.decodes[0], raising(error))
        assert (right(), 1) == await ask(c)


async def test_unified_worker_dies(cluster: ClusterMaker) -> None:
    """Unified mode resumes on the other worker as well."""
    async with cluster(prefill=0, decode=2) as c:
        for worker in c.decodes:
            worker.hooks["token"] = once(worker, worker.kill, at=3)
        c.decodes[1].hooks.clear()
        assert [right()] * 2 == [(await ask(c))[0] for _ in range(2)]
        local = [r.mode for w in c.decodes for r in w.requests if isinstance(r, DecodeRequest)]
        assert {"local"} == set(local)


async def test_the_only_worker_is_waited_for(cluster: ClusterMaker) -> None:
    """A broken request waits for its only decode worker to come back, and then ends right."""
    async with cluster(health_interval_s=0.05) as c:
        worker = c.decodes[0]
        restarted: list[asyncio.Task[None]] = []

        async def restart() -> None:
            restarted.append(asyncio.create_task(worker.restart()))
            await asyncio.Event().wait()

        worker.hooks["token"] = once(worker, restart, at=3)
        assert (right(), 1) == await ask(c)
        await asyncio.gather(*restarted)


async def test_a_worker_that_stays_away_is_an_error_in_time(cluster: ClusterMaker) -> None:
    """Without a worker coming back the request ends with 502 after the bounded wait, once its tokens are out."""
    async with cluster(recovery_wait_s=0.2) as c:
        c.decodes[0].hooks["token"] = once(c.decodes[0], c.decodes[0].kill, at=2)
        async with c.dispatcher.relay(job()) as relay:
            assert [right()[0][0]] == [t.token_id for t in await anext(relay)]
            with pytest.raises(BackendError):
                await answer(relay)
        await c.quiet()


@pytest.mark.parametrize("refusals", [1, None])
async def test_a_full_worker_is_asked_again_for_a_bounded_time(
    cluster: ClusterMaker, refusals: int | None
) -> None:
    """A begun request waits for room at the one worker that is left, but it once did so to its deadline."""
    async with cluster(decode=2, recovery_wait_s=1.0) as c:
        [mortal, other] = c.decodes
        num_refused = 0

        async def full(_: Work) -> None:
            nonlocal num_refused
            if not mortal.seen["token"]:
                raise Overloaded("no blocks yet")
            if num_refused != refusals:
                num_refused += 1
                raise Overloaded("no blocks")

        mortal.hooks["token"] = once(mortal, mortal.kill, at=2)
        other.hooks["reserve"] = full
        async with asyncio.timeout(10):
            if refusals:
                assert (right(), 1) == await ask(c)
            else:
                with pytest.raises(Overloaded, match=r"no blocks$"):
                    await ask(c)
                await c.quiet()
        assert num_refused in range(1, 5)  # at once, and each half second


async def test_each_choice_has_its_own_tries(cluster: ClusterMaker) -> None:
    """Three choices that lose their workers twice at the same time still have tries left each."""
    async with cluster(decode=3, max_tries=3) as c:
        deaths = 0

        async def die_twice(worker: FakeWorker) -> None:
            nonlocal deaths
            if deaths < 2:
                deaths += 1
                await worker.kill()

        for worker in c.decodes:
            worker.hooks["token"] = lambda _, w=worker: die_twice(w)  # type: ignore[misc]
        tokens, _ = await ask(c, n=3)
        assert (right(3), 2) == (tokens, deaths)


async def test_choices_that_all_fail_are_one_error(cluster: ClusterMaker) -> None:
    """When every resumed choice runs out of tries the client is told one plain error."""

    async def fail(_: Work) -> None:
        raise EngineFault("the engine failed")

    async with cluster() as c:
        c.decodes[0].hooks["token"] = fail
        async with c.dispatcher.relay(job(n=3)) as relay:
            with pytest.raises(EngineFault):
                await answer(relay, 3)
        await c.quiet()


async def test_a_stopped_process_is_left_before_its_time_out(cluster: ClusterMaker) -> None:
    """A worker that answers neither the request nor two looks in a row is left long before the stage's limit."""

    async def frozen(_: Work) -> None:
        await asyncio.Event().wait()

    async with cluster(decode=2, health_interval_s=0.1, health_timeout_s=0.5) as c:
        for point in ("reserve", "info"):
            c.decodes[0].hooks[point] = frozen
        assert [right()] * 2 == [(await ask(c))[0] for _ in range(2)]


@both_loops
async def test_connections_closed_while_idle_cost_nothing(cluster: ClusterMaker) -> None:
    """A kept connection that the worker has closed is replaced without the request noticing."""
    async with cluster(health_interval_s=30) as c:
        for _ in range(5):
            assert (right(), 0) == await ask(c)
            for worker in c.workers:
                assert worker._server is not None
                for connection in list(worker._server.server_state.connections):
                    connection.transport.abort()


async def test_tries_are_bounded(cluster: ClusterMaker) -> None:
    """A fault that comes every time ends after max_tries, and a hand-off failure is a 502 for the client."""

    async def damaged(_: Work) -> None:
        raise DigestMismatch("damaged")

    async with cluster(decode=2, max_tries=3) as c:
        for worker in c.decodes:
            worker.hooks["injected"] = damaged
        async with c.dispatcher.relay(job()) as relay:
            with pytest.raises(BackendError) as caught:
                await answer(relay)
        assert ("backend_error", 2) == (caught.value.code, relay.report.retries)
        assert 3 == sum(len(w.requests) for w in c.decodes)
        await c.quiet()


async def test_a_silent_decode_worker_is_left(cluster: ClusterMaker) -> None:
    """A worker that accepts and never answers costs its stage's time-out, then another one serves."""

    async def silent(_: Work) -> None:
        await asyncio.Event().wait()

    async with cluster(decode=2, reserve_timeout_s=0.2) as c:
        c.decodes[0].hooks["reserve"] = silent
        assert [right()] * 2 == [(await ask(c))[0] for _ in range(2)]
        c.decodes[1].hooks["reserve"] = silent
        async with c.dispatcher.relay(job()) as relay:
            with pytest.raises(BackendTimeout):
                await answer(relay)
        await c.quiet()


async def test_a_full_prefill_worker_is_passed_over(cluster: ClusterMaker) -> None:
    """429 from one prefill worker keeps the reservation and takes the other."""

    async def full(_: Work) -> None:
        raise Overloaded("queue is full", retry_after_s=3)

    async with cluster(prefill=2) as c:
        c.prefills[0].hooks["received"] = full
        assert [(right(), 0)] * 2 == [await ask(c) for _ in range(2)]
        assert 2 == len(c.decodes[0].requests)


async def test_different_fingerprints_are_never_paired(cluster: ClusterMaker) -> None:
    """A decode worker with another dtype gets nothing, and /ready's report names the field."""
    async with cluster(prefill=1, decode=2, health_interval_s=0.05) as c:
        odd = c.decodes[0]
        odd.fingerprint = odd.fingerprint.model_copy(update={"dtype": "bfloat16"})
        while not c.registry.report()["conflicts"]:
            await odd.until(lambda w, seen=odd.seen["info"]: w.seen["info"] > seen)  # type: ignore[misc]
        for _ in range(3):
            assert right() == (await ask(c))[0]
        assert [] == odd.requests
        assert [{"prefill": "prefill-0", "decode": "decode-0", "fields": ["dtype"]}] == c.registry.report()[
            "conflicts"
        ]


POINTS = [
    ("decode", "reserve"),
    ("decode", "reserved"),
    ("prefill", "received"),
    ("prefill", "first"),
    ("prefill", "send"),
    ("prefill", "done"),
    ("decode", "injected"),
    ("decode", "token"),
    ("decode", "finish"),
]


@pytest.mark.parametrize(("side", "point"), POINTS)
async def test_a_cancel_in_any_stage_closes_both_legs(cluster: ClusterMaker, side: str, point: str) -> None:
    """Closing the relay while a worker is at this point frees both workers and every lease."""

    async def stay(_: Work) -> None:
        await asyncio.Event().wait()

    async with cluster() as c:
        worker = c.prefills[0] if side == "prefill" else c.decodes[0]
        worker.hooks[point] = stay

        async def consume() -> None:
            async with c.dispatcher.relay(job()) as relay:
                await answer(relay)

        client = asyncio.create_task(consume())
        await worker.until(lambda w: w.seen[point] > 0)
        client.cancel()
        with pytest.raises(asyncio.CancelledError):
            await client
        await c.quiet()
        worker.hooks.clear()
        assert right() == (await ask(c))[0]


async def test_many_cancels_leave_nothing(cluster: ClusterMaker) -> None:
    """60 requests that are cancelled at whatever they are doing leave no lease, stream or connection in use."""
    async with cluster(decode=2) as c:

        async def one(steps: int) -> None:
            async with asyncio.timeout(10), c.dispatcher.relay(job(max_tokens=40)) as relay:
                for _ in range(steps):
                    if await anext(relay, None) is None:
                        return

        await asyncio.gather(*(one(i % 5) for i in range(60)))
        await c.quiet()
        assert right() == (await ask(c))[0]

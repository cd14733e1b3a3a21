"""A router's inside over fake workers."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AbstractAsyncContextManager, asynccontextmanager
from dataclasses import dataclass
from time import perf_counter
from typing import Any

import pytest
import structlog
import uvloop

from router.course import Job
from router.fleet import Fleet
from router.policy import LeastOutstanding
from router.relay import Dispatcher, Relay
from router.settings import RouterSettings
from router.workers.client import WorkerClient
from router.workers.registry import Registry
from shared.wire import Sampling
from tests.contract.fakes import SECRET, FakeWorker, fake_workers
from tests.contract.site import checkpoint, site

__all__ = ["checkpoint", "site"]

both_loops = pytest.mark.asyncio(loop_factories=["asyncio", "uvloop"])
"""For what the event loop decides: the router runs on uvloop, which tells of connections in another order."""


def pytest_asyncio_loop_factories(item: pytest.Item) -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """asyncio's loop, and uvloop's as well for tests that are marked `both_loops`."""
    marker = item.get_closest_marker("asyncio")
    plain = {"asyncio": asyncio.new_event_loop}
    is_both = marker is not None and "loop_factories" in marker.kwargs
    return {**plain, "uvloop": uvloop.new_event_loop} if is_both else plain


@dataclass
class Cluster:
    """Running fakes and a dispatcher over them."""

    prefills: list[FakeWorker]
    decodes: list[FakeWorker]
    registry: Registry
    dispatcher: Dispatcher

    @property
    def workers(self) -> list[FakeWorker]:
        return [*self.prefills, *self.decodes]

    async def quiet(self) -> None:
        """Wait until nothing is held anywhere, and check that no lease is left."""
        for worker in self.workers:
            await worker.until(lambda w: w.num_live == 0)
        async with asyncio.timeout(5):
            await self.dispatcher.idle()
        assert [(0, 0)] * len(self.registry.workers) == [
            (w.outstanding_requests, w.outstanding_tokens) for w in self.registry.workers
        ]


@pytest.fixture(autouse=True)
def _quiet_logs() -> Iterator[None]:
    """Keep the workers' access lines from costing more than the requests that they tell of."""
    structlog.configure(wrapper_class=structlog.make_filtering_bound_logger(logging.WARNING))
    yield
    structlog.reset_defaults()


ClusterMaker = Callable[..., AbstractAsyncContextManager[Cluster]]


@pytest.fixture
def cluster() -> ClusterMaker:
    """cluster(prefill=1, decode=1, **settings) -> a context with a Cluster."""

    @asynccontextmanager
    async def make(*, prefill: int = 1, decode: int = 1, **settings: Any) -> AsyncIterator[Cluster]:
        async with fake_workers(prefill=prefill, decode=decode) as (prefills, decodes):
            config = RouterSettings(
                prefill_urls=tuple(w.url for w in prefills),
                decode_urls=tuple(w.url for w in decodes),
                **{"health_interval_s": 1.0, "connect_timeout_s": 10.0, **settings},
            )
            client = WorkerClient(config, SECRET)
            registry = Registry(
                client,
                prefill_urls=config.prefill_urls,
                decode_urls=config.decode_urls,
                interval_s=config.health_interval_s,
            )
            dispatcher = Dispatcher(Fleet(config, client, registry, LeastOutstanding()))
            watching = asyncio.create_task(registry.run())
            try:
                async with asyncio.timeout(5):
                    while not all(w.usable for w in registry.workers):
                        await registry.changed(within_s=5)
                yield Cluster(prefills, decodes, registry, dispatcher)
            finally:
                await dispatcher.aclose()
                watching.cancel()
                await asyncio.wait({watching})
                await client.aclose()

    return make


def job(*, prompt: int = 20, max_tokens: int = 6, n: int = 1, timeout_s: float = 20.0, first: int = 1) -> Job:
    """A prompt of `prompt` tokens."""
    return Job(
        request_id="req-test",
        token_ids=[first, *range(2, prompt + 1)],
        num_choices=n,
        sampling=Sampling(max_tokens=max_tokens),
        timeout_s=timeout_s,
        started=perf_counter(),
    )


async def answer(relay: Relay, n: int = 1) -> list[list[int]]:
    """All tokens of a relay, by choice."""
    choices: list[list[int]] = [[] for _ in range(n)]
    async for tokens in relay:
        for token in tokens:
            choices[token.choice].append(token.token_id)
    return choices

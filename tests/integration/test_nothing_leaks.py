"""Whatever ends a request, every block comes back, on both sides."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import http
from tests.support.cluster import Cluster, run_cluster
from tests.support.completions import GREEDY, complete, random_prompt, token_ids
from tests.support.oracle import Oracle

NUM_CANCELS = 500


@pytest.fixture(scope="module")
def small(tiny_model: Path) -> Iterator[Cluster]:
    """A cluster whose decode pool holds a few requests at a time, with small chunks."""
    pool = {"kv_pool_bytes": 2 << 20, "chunk_size": 64}
    with run_cluster(tiny_model, prefill=pool, decode=pool) as cluster:
        yield cluster


def test_a_long_prompt_with_32_answers_leaves_no_block(pd: Cluster) -> None:
    """1,024 prompt tokens, then 32 choices that share and copy its blocks."""
    response = complete(pd, random_prompt(1024, seed=1), n=32, max_tokens=8, temperature=1, seed=2)

    assert len(token_ids(response)) == 32
    pd.check_nothing_left()


def test_500_random_cancels_leave_no_block_and_harm_nobody(small: Cluster, oracle: Oracle) -> None:
    """Clients leave at random times, from before prefill to the middle of decode."""
    rng = random.Random(7)
    survivor = random_prompt(50, seed=500)
    expected = oracle(survivor, 12)

    async def leave(client: httpx.AsyncClient, index: int) -> None:
        body: dict[str, Any] = {
            "model": "tiny",
            "prompt": random_prompt(rng.randrange(1, 300), seed=index),
            "max_tokens": 200,
            "n": rng.choice([1, 1, 1, 3]),
            "stream": bool(index % 2),
            "ignore_eos": True,
        }
        try:
            async with asyncio.timeout(rng.uniform(0, 0.25)):
                async with client.stream("POST", "/v1/completions", json=body) as response:
                    async for _ in response.aiter_bytes():
                        pass
        except TimeoutError:
            return

    async def stay(client: httpx.AsyncClient) -> list[int]:
        body = {"model": "tiny", "prompt": survivor, "max_tokens": 12, "return_token_ids": True} | GREEDY
        response = await client.post("/v1/completions", json=body)
        ids: list[int] = response.json()["choices"][0]["token_ids"]
        return ids

    async def run() -> list[list[int]]:
        limits = httpx.Limits(max_connections=64)
        async with httpx.AsyncClient(base_url=small.url, timeout=60, limits=limits) as client:
            answers = []
            for start in range(0, NUM_CANCELS, 20):
                leaving = [leave(client, index) for index in range(start, start + 20)]
                staying = asyncio.create_task(stay(client))
                await asyncio.gather(*leaving)
                answers.append(await staying)
            return answers

    answers = asyncio.run(run())

    assert [expected] * (NUM_CANCELS // 20) == answers
    small.check_nothing_left()


def test_refused_requests_leave_no_block(small: Cluster) -> None:
    """Too long, out of range, out of room: nothing is reserved for what is refused."""
    refusals: list[dict[str, Any]] = [
        {"prompt": random_prompt(5000, seed=1)},
        {"prompt": [10**6]},
        {"prompt": [5], "max_tokens": 10**6},
        {"prompt": [5], "n": 129},
    ]
    for fields in refusals:
        body = {"model": "tiny"} | fields
        response = http.post(f"{small.url}/v1/completions", json=body)
        assert 400 == response.status_code, response.text
    small.check_nothing_left()

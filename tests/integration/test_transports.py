"""Transports under real workers: either side killed in mid-transfer, and aborts at random in a small pool."""

from __future__ import annotations

import asyncio
import importlib.util
import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from shared.kv.receiver import Offer
from shared.kv.ticket import Ticket
from shared.wire import DecodeEvent, DecodeRequest, Handoff, PrefillRequest, Sampling
from tests.support import kv_peers
from tests.support.cluster import AUTH, SECRET, Cluster, RunningWorker, run_cluster, run_worker, wait_until
from tests.support.completions import GREEDY, complete, random_prompt, token_ids
from tests.support.handoffs import expected_by
from tests.support.oracle import Oracle

TRANSPORTS = ("nixl", "shm", "unix", "tcp")
NUM_TOKENS = 512
GREEDY_SAMPLING = Sampling(temperature=0, max_tokens=4, ignore_eos=True)


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """Rounds of the aborts, each with a seed of its own."""
    if "seed" in metafunc.fixturenames:
        metafunc.parametrize("seed", range(20 if metafunc.config.getoption("--stress") else 2))


@pytest.fixture
def num_kills(request: pytest.FixtureRequest) -> int:
    """How often a process is killed in mid-transfer."""
    return 50 if request.config.getoption("--stress") else 10


def segments() -> list[str]:
    """What this process has mapped or holds open of peers' shared memory: segments, and pools to read."""
    lines = Path("/proc/self/maps").read_text().splitlines()
    held = [line for line in lines if "handoff-kv" in line or ("handoff-pool" in line and " r--s " in line)]
    for descriptor in Path("/proc/self/fd").iterdir():
        try:
            target = str(descriptor.readlink())
        except FileNotFoundError:
            continue
        held += [target] if "handoff-kv" in target else []
    return held


def free_of(running: RunningWorker) -> None:
    """Wait until the worker holds no block and no segment."""
    wait_until(lambda: running.worker.engine.num_groups == 0 and not segments())
    counts = running.worker.pool.counts()
    assert (counts.live, counts.promised, counts.leaked) == (0, 0, 0)
    running.worker.pool.check_integrity()


@pytest.fixture(scope="module")
def decode(tiny_model: Path) -> Iterator[RunningWorker]:
    """A decode worker alone."""
    with run_worker("decode", tiny_model, kv_transports=",".join(TRANSPORTS)) as running:
        yield running


@pytest.mark.parametrize("transport", [*TRANSPORTS, "ring"])
def test_killed_sender_leaves_nothing(decode: RunningWorker, transport: str, num_kills: int) -> None:
    """SIGKILL of the sender in mid-transfer: decode frees claim and memory, and the blocks with the request.

    `ring`: shared memory from a pool that nobody can map.
    """
    prompt = random_prompt(NUM_TOKENS, seed=1)
    rng = random.Random(transport)
    told = "shm" if transport == "ring" else transport
    puts = decode.metric("handoff_kv_puts_total", transport=told)
    for number in range(num_kills):
        request = DecodeRequest(
            request_id=f"r{number}",
            token_ids=prompt,
            num_prompt_tokens=len(prompt),
            sampling=GREEDY_SAMPLING,
            timeout_s=60,
        )
        with httpx.stream(
            "POST", f"{decode.url}/v1/decode", content=request.to_json(), headers=AUTH, timeout=30
        ) as stream:
            lines = stream.iter_lines()  # kept: the stream is closed with its iterator
            handoff = DecodeEvent.model_validate_json(next(lines)).reserved
            assert handoff is not None
            want = expected_by(decode, prompt, handoff)
            process, pipe = kv_peers.start(kv_peers.send_part, SECRET.encode(), handoff, want, transport)
            assert "sending" == pipe.recv()
            # Anywhere from before its connection to its wait for the third chunk; mostly the latter.
            process.join(rng.uniform(0, 0.05))
            kv_peers.kill(process)
            pipe.close()
            wait_until(lambda: not segments())
        free_of(decode)
    assert decode.metric("handoff_kv_puts_total", transport=told) - puts >= num_kills / 4
    assert decode.metric("handoff_kv_puts_total", transport=told, status="200") == 0


@pytest.mark.parametrize("transport", TRANSPORTS)
def test_killed_receiver_leaves_nothing(tiny_model: Path, transport: str, num_kills: int) -> None:
    """SIGKILL of the receiving process in mid-transfer: prefill reports a lost worker and frees everything."""
    with run_worker("prefill", tiny_model, chunk_size=64, kv_transports=transport) as prefill:
        for number in range(num_kills):
            prompt = random_prompt(NUM_TOKENS, seed=number)
            want = expected_by(prefill, prompt)
            process, pipe = kv_peers.start(kv_peers.receive_part, SECRET.encode(), want, transport)
            request = PrefillRequest(
                request_id=f"r{number}",
                token_ids=prompt,
                num_prompt_tokens=len(prompt),
                sampling=GREEDY_SAMPLING,
                timeout_s=60,
                handoff=granted(pipe.recv()),
            )
            with httpx.stream(
                "POST", f"{prefill.url}/v1/prefill", content=request.to_json(), headers=AUTH, timeout=30
            ) as stream:
                assert "chunk" == pipe.recv()
                kv_peers.kill(process)
                lines = [json.loads(line) for line in stream.iter_lines()]
            pipe.close()
            assert "backend_error" == lines[-1]["error"]["code"]
            assert not any("sent" in line for line in lines)
            free_of(prefill)


def granted(offer: Offer) -> Handoff:
    """A reservation of the peer with this listener."""
    url = offer.kv_url("h1")
    ticket = Ticket("h1", 1, url, kv_peers.BOOT, 1e18, host_id=offer.host_id, kv_socket=offer.kv_socket)
    return Handoff(
        handoff_id="h1",
        epoch=1,
        kv_url=url,
        ticket=ticket.sign(SECRET.encode()),
        have_tokens=0,
        transports=offer.transports,
    )


@pytest.fixture(scope="module", params=TRANSPORTS)
def small(tiny_model: Path, request: pytest.FixtureRequest) -> Iterator[tuple[str, Cluster]]:
    """A cluster on one transport whose decode pool holds a few requests at a time."""
    if request.param == "nixl" and importlib.util.find_spec("nixl_cu12") is None:
        pytest.skip("the extra handoff[nixl] is not installed")
    pool = {"kv_pool_bytes": 1 << 20, "chunk_size": 64, "kv_transports": request.param}
    with run_cluster(tiny_model, prefill=pool, decode=pool) as cluster:
        yield request.param, cluster


def test_the_transport_is_told(small: tuple[str, Cluster]) -> None:
    """In the response's header, and in the metrics of both sides."""
    transport, cluster = small
    response = complete(cluster, random_prompt(100, seed=1), max_tokens=2, **GREEDY)
    assert transport == response.headers["x-handoff-transport"]
    for worker, name in ((cluster.prefill[0], "sent"), (cluster.decode[0], "received")):
        assert worker.metric(f"handoff_kv_{name}_bytes_total", transport=transport) > 0


def test_survivors_of_random_aborts_are_exact(small: tuple[str, Cluster], oracle: Oracle, seed: int) -> None:
    """32 greedy requests in a small pool, half of them aborted at random: every other one gets its own tokens."""
    _, cluster = small
    rng = random.Random(seed)
    prompts = [random_prompt(rng.randrange(20, 200), seed=1000 * seed + i) for i in range(32)]
    aborted = set(rng.sample(range(len(prompts)), len(prompts) // 2))

    async def ask(client: httpx.AsyncClient, index: int) -> list[int] | None:
        body: dict[str, Any] = {"model": "tiny", "prompt": prompts[index], "max_tokens": 8, **GREEDY}
        body |= {"return_token_ids": True}
        while True:
            try:
                async with asyncio.timeout(rng.uniform(0, 0.5) if index in aborted else 60):
                    response = await client.post(f"{cluster.url}/v1/completions", json=body)
            except TimeoutError:
                return None
            if response.status_code == 200:
                return token_ids(response)[0]
            assert response.status_code in (429, 503), response.text
            await asyncio.sleep(0.02)  # as the answer says: later

    async def all_of_them() -> list[list[int] | None]:
        async with httpx.AsyncClient(timeout=60, trust_env=False) as client:
            return await asyncio.gather(*(ask(client, index) for index in range(len(prompts))))

    answers = asyncio.run(all_of_them())

    survivors = [index for index in range(len(prompts)) if index not in aborted]
    assert [oracle(prompts[index], 8) for index in survivors] == [answers[index] for index in survivors]
    cluster.check_nothing_left()

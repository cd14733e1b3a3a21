"""`handoff bench router`: what the router adds to a request and to a token, over workers that answer at once.

The first token through the router is compared with the same calls made to the workers directly, in turns and by
the same client: in unified mode one call, in PD mode a reservation at decode and then prefill under it. Prefill
alone, which no answer could follow, is shown beside, and what the router adds to that; the goal is not about it.
The client is the router's own, which is lean: a general one spends longer on a request than what is to be measured.
Throughput is that of one router process on a core of its own; workers and client share the others.
"""

from __future__ import annotations

import asyncio
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from time import perf_counter
from typing import Any

from rich.console import Console
from rich.table import Table

from router.checkpoint import Checkpoint
from services.cli.bench_client import BenchClient
from services.cli.bench_stack import StackFailed, free_port, spawned, wait_until_ready
from shared.wire import DecodeEvent, DecodeRequest, PrefillRequest, Wire

ADDED_MS = 3.0
TOKENS_PER_S = 5_000.0
SECRET = "a-secret-of-the-benchmark"  # noqa: S105 - it guards nothing
_PROMPT = list(range(32, 64))
_WORK: dict[str, Any] = {
    "request_id": "direct",
    "token_ids": _PROMPT,
    "num_prompt_tokens": len(_PROMPT),
    "sampling": {"max_tokens": 2},
    "timeout_s": 60.0,
}
PREFILL_ALONE = "prefill alone"
_START_S = 60.0


@dataclass(frozen=True)
class Plan:
    """runs: first tokens, each way. streams at a time, of `tokens` each, `rounds` times: throughput."""

    runs: int = 200
    streams: int = 32
    tokens: int = 200
    rounds: int = 5


@dataclass
class Result:
    """Seconds to the first token by way, and of every round its streamed tokens a second.

    cpu_tokens_per_s: the same over the router's own CPU time, which what else the host does cannot spoil.
    cpu_first_ms: the router's CPU time for one short request over both workers.
    """

    first_s: dict[str, list[float]] = field(default_factory=dict)
    tokens_per_s: list[float] = field(default_factory=list)
    cpu_tokens_per_s: list[float] = field(default_factory=list)
    cpu_first_ms: float = 0.0

    def added_ms(self, topology: str, baseline: str | None = None) -> float:
        """Median of what the router adds: the way through it less the direct one before it.

        baseline: another way in place of the same calls, such as prefill alone.
        """
        pairs = zip(self.first_s[topology], self.first_s[baseline or f"{topology} worker"], strict=True)
        return median(through - direct for through, direct in pairs) * 1e3

    @property
    def goals(self) -> dict[str, bool]:
        """The stated goals, and whether they are met."""
        goals = {
            f"added to the first token, {topology}: {self.added_ms(topology):.2f} of {ADDED_MS:g} ms": (
                self.added_ms(topology) < ADDED_MS
            )
            for topology in ("pd", "unified")
        }
        speed = median(self.tokens_per_s)
        goals[f"streamed tokens/s on one core: {speed:,.0f} of {TOKENS_PER_S:,.0f}"] = speed >= TOKENS_PER_S
        return goals

    def to_dict(self) -> dict[str, object]:
        """For machines."""
        return {
            "first_token_p50_ms": {way: median(times) * 1e3 for way, times in self.first_s.items()},
            "added_p50_ms": {topology: self.added_ms(topology) for topology in ("pd", "unified")},
            "added_to_prefill_alone_p50_ms": self.added_ms("pd", PREFILL_ALONE),
            "tokens_per_s": self.tokens_per_s,
            "cpu_tokens_per_s": self.cpu_tokens_per_s,
            "cpu_first_ms": self.cpu_first_ms,
            "goals": self.goals,
        }


def measure_router(plan: Plan, folder: Path, cores: Sequence[int], environ: Mapping[str, str]) -> Result:
    """Start workers and both routers, measure, stop them. Raises StackFailed."""
    checkpoint = Checkpoint.load(folder, "instant")
    prefill_port, decode_port = free_port(), free_port()
    router_core, other_cores = cores[0], cores[1:] or cores
    os.sched_setaffinity(0, other_cores)
    arguments = [str(prefill_port), str(decode_port), checkpoint.tokenizer_digest, "4096"]
    prefill, decode = (f"http://127.0.0.1:{port}" for port in (prefill_port, decode_port))
    with (
        spawned([sys.executable, "-m", "services.cli.instant_workers", *arguments], environ),
        _router(folder, router_core, environ, prefill, decode) as pd,
        _router(folder, router_core, environ, "", decode) as unified,
    ):
        urls = {"pd": pd.url, "unified": unified.url}
        return asyncio.run(_measure(plan, urls, prefill, decode, pd.cpu_s))


def print_router(console: Console, result: Result) -> None:
    """Tables for people, then the goals."""
    table = Table("way", "p50 ms", "p99 ms", title="to the first token")
    for way, times in result.first_s.items():
        ordered = sorted(times)
        table.add_row(
            way, f"{median(times) * 1e3:.2f}", f"{ordered[-(-99 * len(ordered) // 100) - 1] * 1e3:.2f}"
        )
    console.print(table)
    console.print(
        f"pd adds {result.added_ms('pd'):.2f} ms to the same two calls, which is its goal's measure, and "
        f"{result.added_ms('pd', PREFILL_ALONE):.2f} ms to prefill alone"
    )
    console.print(
        f"the router's own CPU time: {result.cpu_first_ms:.2f} ms for a request of two tokens, "
        f"{median(result.cpu_tokens_per_s):,.0f} streamed tokens for a second of it"
    )
    for goal, is_met in result.goals.items():
        console.print(f"{'met   ' if is_met else 'MISSED'}  {goal}")


async def _measure(
    plan: Plan, routers: Mapping[str, str], prefill: str, decode: str, cpu_s: Callable[[], float]
) -> Result:
    result = Result()
    begun_s = 0.0
    with BenchClient(SECRET, (prefill, decode, *routers.values())) as client:
        for run in range(-plan.runs // 10, plan.runs):  # the first ones warm up
            for topology, url in routers.items():
                begun = perf_counter()
                if topology == "pd":
                    by_workers = await _over_both(client, prefill, decode) - begun
                    begun = perf_counter()
                    alone = await _over_one(client, prefill, "/v1/prefill", PrefillRequest(**_WORK)) - begun
                    if run >= 0:
                        result.first_s.setdefault(PREFILL_ALONE, []).append(alone)
                else:
                    work = DecodeRequest(mode="local", **_WORK)
                    by_workers = await _over_one(client, decode, "/v1/decode", work) - begun
                begun = perf_counter()
                async with client.post(url, "/v1/completions", _body(2)) as answer:
                    await answer.lines()
                    through = perf_counter() - begun
                    await answer.end()
                if run >= 0:
                    result.first_s.setdefault(f"{topology} worker", []).append(by_workers)
                    result.first_s.setdefault(topology, []).append(through)
            if run == 0:
                begun_s = cpu_s()
        result.cpu_first_ms = (cpu_s() - begun_s) / max(plan.runs - 1, 1) * 1e3
        for _ in range(plan.rounds):
            started, begun_s = perf_counter(), cpu_s()
            streams = (_whole(client, routers["pd"], plan.tokens) for _ in range(plan.streams))
            counts = await asyncio.gather(*streams)
            result.tokens_per_s.append(sum(counts) / (perf_counter() - started))
            # The kernel counts in ticks: a round that is shorter than one took less than that.
            least_s = 1 / os.sysconf("SC_CLK_TCK")
            result.cpu_tokens_per_s.append(sum(counts) / max(cpu_s() - begun_s, least_s))
    return result


async def _over_both(client: BenchClient, prefill: str, decode: str) -> float:
    """The time at which prefill's first token is there, under a reservation at decode."""
    async with client.post(decode, "/v1/decode", DecodeRequest(**_WORK).to_json()) as reserved:
        handoff = DecodeEvent.model_validate_json((await reserved.lines())[0]).reserved
        came = await _over_one(client, prefill, "/v1/prefill", PrefillRequest(handoff=handoff, **_WORK))
        await reserved.end()
    return came


async def _over_one(client: BenchClient, url: str, path: str, work: Wire) -> float:
    """The time at which a worker's first token is there."""
    async with client.post(url, path, work.to_json()) as answer:
        await answer.lines()
        came = perf_counter()
        await answer.end()
    return came


async def _whole(client: BenchClient, url: str, tokens: int) -> int:
    """Tokens of one stream, counted by its events."""
    counted = 0
    async with client.post(url, "/v1/completions", _body(tokens)) as answer:
        while lines := await answer.lines():
            counted += sum(b'"text":"' in line and b'"text":"",' not in line for line in lines)
    if counted != tokens:
        raise StackFailed(f"{counted} of {tokens} tokens came")
    return counted


def _body(tokens: int) -> bytes:
    ids = ",".join(map(str, _PROMPT))
    return f'{{"prompt":[{ids}],"max_tokens":{tokens},"stream":true}}'.encode()


@dataclass(frozen=True)
class _Router:
    """A running router process."""

    url: str
    pid: int

    def cpu_s(self) -> float:
        """CPU seconds that it has used. Source: proc(5), utime and stime."""
        fields = Path(f"/proc/{self.pid}/stat").read_text().rpartition(")")[2].split()
        return (int(fields[11]) + int(fields[12])) / os.sysconf("SC_CLK_TCK")


@contextmanager
def _router(
    folder: Path, core: int, environ: Mapping[str, str], prefill: str, decode: str
) -> Iterator[_Router]:
    """A ready router process that keeps to one core."""
    port = free_port()
    own = {
        "HANDOFF_MODEL": str(folder),
        "HANDOFF_SECRET": SECRET,
        "HANDOFF_PORT": str(port),
        "HANDOFF_PREFILL_URLS": prefill,
        "HANDOFF_DECODE_URLS": decode,
        "HANDOFF_LOG_LEVEL": "warning",
        # Workers and client share what cores are left and may be slow to look up; that is no loss of a worker.
        "HANDOFF_CONNECT_TIMEOUT_S": "30",
        "HANDOFF_HEALTH_TIMEOUT_S": "30",
    }
    outside = {name: value for name, value in environ.items() if not name.startswith("HANDOFF_")}
    command = [sys.executable, "-m", "services.cli.main", "router"]
    with spawned(command, outside | own) as process:
        os.sched_setaffinity(process.pid, {core})
        url = f"http://127.0.0.1:{port}"
        wait_until_ready(process, url, _START_S)
        yield _Router(url, process.pid)

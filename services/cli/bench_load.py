"""What `handoff bench load` sends, decided before anything is sent, and the sending of it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

from loadtest.client import LoadClient, Request
from loadtest.drive import closed_loop, open_loop
from loadtest.metrics import RequestRecord
from loadtest.traces import Scale, find, read
from loadtest.workload import Timed, poisson, replay, synthetic

DEFAULT_NUM_REQUESTS = 32


@dataclass(frozen=True, slots=True)
class Shape:
    """Of synthetic requests. num_requests None: DEFAULT_NUM_REQUESTS, or all of a trace."""

    num_requests: int | None
    prompt_tokens: int
    output_tokens: int
    chat: bool
    seed: int

    def requests(self) -> list[Request]:
        """All of them, no two alike."""
        made = synthetic(
            prompt_tokens=self.prompt_tokens,
            max_tokens=self.output_tokens,
            seed=self.seed,
            chat=self.chat,
        )
        return list(islice(made, self.num_requests or DEFAULT_NUM_REQUESTS))

    def facts(self, workload: str) -> dict[str, object]:
        """For the report."""
        return {
            "workload": workload,
            "seed": self.seed,
            "prompt_tokens_each": self.prompt_tokens,
            "output_tokens_each": self.output_tokens,
        }


@dataclass(frozen=True, slots=True)
class ClosedLoop:
    """So many users without pauses."""

    requests: list[Request]
    concurrency: int
    facts: Mapping[str, object]

    async def run(self, client: LoadClient) -> list[RequestRecord]:
        """Send all of it."""
        return await closed_loop(client, self.requests, concurrency=self.concurrency)


@dataclass(frozen=True, slots=True)
class OpenLoop:
    """Requests that are due whatever the server does."""

    timed: list[Timed]
    facts: Mapping[str, object]

    async def run(self, client: LoadClient) -> list[RequestRecord]:
        """Send all of it, on time."""
        return await open_loop(client, self.timed)


def closed(shape: Shape, concurrency: int) -> ClosedLoop:
    """A closed loop of synthetic requests."""
    return ClosedLoop(shape.requests(), concurrency, shape.facts(f"closed loop, concurrency {concurrency}"))


def poisson_arrivals(shape: Shape, rate_per_s: float) -> OpenLoop:
    """Synthetic requests that arrive as a Poisson process."""
    timed = list(poisson(shape.requests(), rate_per_s=rate_per_s, seed=shape.seed))
    return OpenLoop(timed, shape.facts(f"open loop, Poisson, {rate_per_s:g} requests/s"))


def trace_replay(trace: str, scale: Scale, *, num_requests: int | None, seed: int) -> OpenLoop:
    """A trace, scaled; by how much is among the facts. Raises BadTrace."""
    planned = replay(read(find(trace), limit=num_requests), scale, seed=seed)
    facts = {"workload": f"trace {Path(trace).name}", "seed": seed, **planned.to_dict()}
    return OpenLoop(list(planned.requests), facts)

"""The measurements of `handoff doctor`, each by a worker's real routes and bounded in size, number and time."""

from __future__ import annotations

import asyncio
import random
import secrets
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from itertools import pairwise
from statistics import median
from typing import Any, TypeVar

import httpx
from pydantic import ValidationError

from services.cli.doctor_checks import Clock, Seen
from services.cli.doctor_model import Link
from services.cli.workers import WorkerProblem, refused
from shared.asgi.answers import from_error_body, from_error_response
from shared.wire import (
    DecodeEvent,
    DecodeRequest,
    Handoff,
    PrefillEvent,
    PrefillRequest,
    Sampling,
    Sent,
    WorkerInfo,
)
from shared.wire_probe import HostReport, ProbeSend

TIMEOUT_S = 120.0
MAX_PROBE_BYTES = 64 << 20
_STEPS = 12
_STEP_PROMPT = 8
_MAX_ERROR_BYTES = 64 * 1024

E = TypeVar("E", DecodeEvent, PrefillEvent)
M = TypeVar("M", WorkerInfo, HostReport)


@dataclass(frozen=True)
class Transfers:
    """One transport, with KV in the format in which a request's would travel there.

    sent: by KV bytes as they are in the pool, each in the order of the runs; problem: why there are none.
    """

    name: str
    sent: dict[int, list[Sent]]
    problem: str | None = None

    @property
    def link(self) -> Link | None:
        """Fixed cost and bandwidth, of KV bytes in the pool whatever travels; None if it does not work."""
        return Link.through(self.medians()) if len(self.sent) > 1 else None

    @property
    def largest(self) -> Sent | None:
        """The last of the largest hand-offs; None if it does not work."""
        return self.sent[max(self.sent)][-1] if self.sent else None

    def medians(self) -> list[tuple[int, float]]:
        """(bytes, median seconds) by size; the first run opens the connection and is left out."""
        return [
            (size, median(one.transfer_s for one in sent[1:] or sent))
            for size, sent in sorted(self.sent.items())
        ]


@dataclass(frozen=True)
class Stall:
    """What one running answer lost while a prompt was computed beside it, in all and at once."""

    prompt_tokens: int
    total_s: float
    longest_s: float


class Worker:
    """One worker's routes. Every failure is a WorkerProblem with one clear line."""

    def __init__(self, client: httpx.AsyncClient, url: str) -> None:
        self.url = url
        self._client = client

    async def get(self, path: str, model: type[M]) -> M:
        """One GET."""
        try:
            response = await self._client.get(f"{self.url}{path}")
            if response.status_code != httpx.codes.OK:
                raise refused(self.url, from_error_response(response.status_code, response.content))
            return model.model_validate_json(response.content)
        except (httpx.HTTPError, httpx.InvalidURL) as exc:
            raise WorkerProblem(f"{self.url}: {str(exc) or type(exc).__name__}") from exc
        except ValidationError as exc:
            raise WorkerProblem(f"{self.url}: this is no worker of this version of handoff") from exc

    @asynccontextmanager
    async def events(self, path: str, body: bytes, model: type[E]) -> AsyncIterator[AsyncIterator[E]]:
        """The events of one NDJSON stream; leaving cancels its work."""
        try:
            async with self._client.stream("POST", f"{self.url}{path}", content=body) as response:
                if response.status_code != httpx.codes.OK:
                    content = (await response.aread())[:_MAX_ERROR_BYTES]
                    raise refused(self.url, from_error_response(response.status_code, content))
                yield self._read(response, model)
        except httpx.HTTPError as exc:
            raise WorkerProblem(f"{self.url}: {str(exc) or type(exc).__name__}") from exc

    async def _read(self, response: httpx.Response, model: type[E]) -> AsyncIterator[E]:
        async for line in response.aiter_lines():
            try:
                event = model.model_validate_json(line)
            except ValidationError as exc:
                raise WorkerProblem(f"{self.url}: the answer was cut, or is none of this version") from exc
            if event.error is not None:
                raise refused(self.url, from_error_body(event.error))
            yield event


class Probes:
    """Measures one pair. rng: makes prompts that no prefix cache knows."""

    def __init__(self, prefill: Worker, decode: Worker, rng: random.Random) -> None:
        self._prefill = prefill
        self._decode = decode
        self._rng = rng

    async def look(self, worker: Worker, info: WorkerInfo) -> Seen:
        """Host and clocks: two looks, and how much time passed between them there and here."""
        first, first_at, first_error_s = await self._host(worker)
        await asyncio.sleep(0.5)
        second, second_at, error_s = await self._host(worker)
        passed_s = second_at - first_at
        rate = (second.monotonic_s - first.monotonic_s) / passed_s
        ahead_s = second.wall_s - (time.time() - (time.monotonic() - second_at))
        return Seen(info, second, Clock(rate, (first_error_s + error_s) / passed_s, ahead_s, error_s))

    async def _host(self, worker: Worker) -> tuple[HostReport, float, float]:
        """The report, our monotonic time when it was made, and how far off that can be."""
        began = time.monotonic()
        report = await worker.get("/v1/host", HostReport)
        error_s = max(0.0, (time.monotonic() - began - report.measured_s) / 2)
        return report, time.monotonic() - error_s, error_s

    async def transfers(self, name: str, sizes: Sequence[int], bytes_per_token: int, runs: int) -> Transfers:
        """Made-up KV of so many tokens, `runs` times each, over one transport."""
        sent: dict[int, list[Sent]] = {}
        for num_tokens in sizes:
            work = self._work(num_tokens, 1)
            async with self._reservation(work) as handoff:
                if name not in handoff.transports:
                    return Transfers(name, {}, "the decode worker does not offer it")
                try:
                    sent[num_tokens * bytes_per_token] = await self._send(work, handoff, (name,), runs)
                except WorkerProblem as exc:
                    return Transfers(name, {}, str(exc))
        return Transfers(name, sent)

    async def taken(self, names: Sequence[str], num_tokens: int) -> str:
        """Which of these transports a request of so many tokens takes: prefill chooses, as it does for requests."""
        work = self._work(num_tokens, 1)
        async with self._reservation(work) as handoff:
            [sent] = await self._send(work, handoff, tuple(names), 1)
        if sent.transport not in names:
            raise WorkerProblem(f"{self._prefill.url}: sent over {sent.transport}, which it was not to")
        return sent.transport

    async def _send(
        self, work: dict[str, Any], handoff: Handoff, names: tuple[str, ...], runs: int
    ) -> list[Sent]:
        """Each run of one probe, over one of these transports."""
        grant = handoff.model_copy(update={"transports": names})
        body = ProbeSend(**work, handoff=grant, runs=runs).to_json()
        sent: list[Sent] = []
        async with self._prefill.events("/v1/prefill/probe", body, PrefillEvent) as events:
            async for event in events:
                if event.sent is not None:
                    sent.append(event.sent)
                if event.done and len(sent) == runs:
                    return sent
        raise WorkerProblem(f"{self._prefill.url}: the answer was cut")

    async def transports(self) -> tuple[str, ...]:
        """What the decode worker offers."""
        async with self._reservation(self._work(1, 1)) as handoff:
            return handoff.transports

    async def reserve_s(self, runs: int) -> float:
        """From asking decode to being granted blocks, the median."""
        times = []
        for _ in range(runs):
            began = time.monotonic()
            async with self._reservation(self._work(16, 1)):
                times.append(time.monotonic() - began)
        return median(times)

    async def remote_prompt_s(self, num_tokens: int) -> float:
        """Computing a prompt at prefill: first chunk to first token."""
        body = PrefillRequest(**self._work(num_tokens, 1)).to_json()
        return await _first_s(self._prefill, "/v1/prefill", body, PrefillEvent)

    async def local_prompt_s(self, num_tokens: int) -> float:
        """The same at decode, as a worker that does both would."""
        body = DecodeRequest(**self._work(num_tokens, 1), mode="local").to_json()
        return await _first_s(self._decode, "/v1/decode", body, DecodeEvent)

    async def step_s(self, num_answers: int) -> float:
        """A decode step with so many answers in it: the median gap between two tokens of one of them."""
        gaps = await asyncio.gather(*(self._gaps(_STEPS, asyncio.Event()) for _ in range(num_answers)))
        return median(gap for own in gaps for gap in own)

    async def stall(self, num_tokens: int, num_steps: int) -> Stall:
        """Compute a prompt at decode while an answer of `num_steps` tokens is decoded there."""
        begun = asyncio.Event()

        async def beside() -> float:
            await begun.wait()
            return await self.local_prompt_s(num_tokens)

        gaps, _ = await asyncio.gather(self._gaps(num_steps, begun), beside())
        usual = median(gaps)
        return Stall(num_tokens, sum(max(0.0, gap - usual) for gap in gaps), max(gaps) - usual)

    async def _gaps(self, num_steps: int, begun: asyncio.Event) -> list[float]:
        """Between the tokens of one answer; `begun` is set when the first ones are there."""
        body = DecodeRequest(**self._work(_STEP_PROMPT, num_steps + 2), mode="local").to_json()
        at: list[float] = []
        async with self._decode.events("/v1/decode", body, DecodeEvent) as events:
            async for event in events:
                if event.tokens is not None:
                    at.append(time.monotonic())
                if len(at) == 2:
                    begun.set()
        if len(at) < 2:
            raise WorkerProblem(f"{self._decode.url}: decoded too few tokens")
        return [later - earlier for earlier, later in pairwise(at)]

    @asynccontextmanager
    async def _reservation(self, work: dict[str, Any]) -> AsyncIterator[Handoff]:
        body = DecodeRequest(**work).to_json()
        async with AsyncExitStack() as stack:
            events = await stack.enter_async_context(
                self._decode.events("/v1/decode/probe", body, DecodeEvent)
            )
            yield await self._reserved(events)

    async def _reserved(self, events: AsyncIterator[DecodeEvent]) -> Handoff:
        async for event in events:
            if event.reserved is not None:
                return event.reserved
        raise WorkerProblem(f"{self._decode.url}: made no reservation")

    def _work(self, num_tokens: int, max_tokens: int) -> dict[str, Any]:
        """A prompt that nobody has sent before. Ids below 200 are in every vocabulary that is served."""
        return {
            "request_id": f"doctor-{secrets.token_hex(8)}",
            "token_ids": [self._rng.randrange(200) for _ in range(num_tokens)],
            "num_prompt_tokens": num_tokens,
            "sampling": Sampling(max_tokens=max_tokens, temperature=0, ignore_eos=True),
            "timeout_s": TIMEOUT_S,
        }


async def _first_s(worker: Worker, path: str, body: bytes, model: type[E]) -> float:
    """What a worker says its prompt took."""
    async with worker.events(path, body, model) as events:
        async for event in events:
            if event.first is not None:
                return event.first.prefill_s
    raise WorkerProblem(f"{worker.url}: brought no first token")

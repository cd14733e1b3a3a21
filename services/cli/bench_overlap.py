"""`handoff bench overlap`: how much of the KV transfer is hidden behind prefill, on a real model.

One decode worker, and a prefill worker for each way to overlap. They are asked directly and in turns, one by one;
every prompt is a new one, so that no prefix cache flatters. All times are the prefill workers' own.
"""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass
from statistics import median
from typing import Any

import httpx
from rich.console import Console
from rich.table import Table

from loadtest.report import show
from services.cli.bench_stack import spawned, wait_until_ready, worker_command
from services.cli.plan import format_cores, split_cores
from shared.wire import DecodeEvent, DecodeRequest, Handoff, PrefillEvent, PrefillRequest, Sampling, Wire

SECRET = "a-secret-of-the-benchmark"  # noqa: S105 - it guards nothing
MAX_SHARE = 0.2
NONE, CHUNKS, LAYERS = "none", "chunks", "chunks, layers"
_TOKENS = 256  # ids of prompts are below it; every vocabulary has so many


@dataclass(frozen=True, slots=True)
class Plan:
    """chunk_size: tokens a step, where there are chunks. start_timeout_s: the first worker may fetch the model."""

    model: str
    prompt_tokens: int = 1024
    chunk_size: int = 256
    runs: int = 5
    threads: int | None = None
    dtype: str | None = None
    transports: str | None = None
    start_timeout_s: float = 1800.0
    seed: int = 0

    def ways(self) -> dict[str, dict[str, str]]:
        """The settings of each way's prefill worker."""
        chunks = {"HANDOFF_CHUNK_SIZE": str(self.chunk_size)}
        no_layers = {"HANDOFF_KV_LAYER_GROUPS": "0"}
        return {NONE: {"HANDOFF_CHUNK_SIZE": "0", **no_layers}, CHUNKS: chunks | no_layers, LAYERS: chunks}


@dataclass(frozen=True, slots=True)
class Run:
    """One hand-off. exposed_ms: first token sampled -> KV injected; hidden_ms: spent sending before that.

    whole_ms: both.
    """

    exposed_ms: float
    hidden_ms: float
    prefill_ms: float
    kv_bytes: int
    transport: str

    @property
    def whole_ms(self) -> float:
        """All the time that the transfer took."""
        return self.exposed_ms + self.hidden_ms

    @property
    def gb_per_s(self) -> float:
        """Bytes of KV over all that time."""
        return self.kv_bytes / self.whole_ms / 1e6


@dataclass(frozen=True)
class Result:
    """Every run of each way."""

    plan: Plan
    runs: dict[str, list[Run]]

    def median_of(self, way: str, field: str) -> float:
        """Of one number of a way's runs."""
        return median(float(getattr(run, field)) for run in self.runs[way])

    def share(self, way: str) -> float:
        """Exposed time over that of a transfer of which nothing overlaps, by medians.

        That is the whole of one without chunks or layers: some of it is hidden even there, for the KV is in the
        pool before the first token is sampled.
        """
        return self.median_of(way, "exposed_ms") / self.median_of(NONE, "whole_ms")

    def share_of_exposed(self, way: str) -> float:
        """Exposed time over what is exposed without chunks or layers."""
        return self.median_of(way, "exposed_ms") / self.median_of(NONE, "exposed_ms")

    @property
    def goals(self) -> dict[str, bool]:
        """The stated goal, and whether it is met."""
        share = self.share(LAYERS)
        return {f"exposed under {MAX_SHARE:.0%} of the unoverlapped transfer: {share:.1%}": share < MAX_SHARE}

    def to_dict(self) -> dict[str, object]:
        """For machines."""
        runs = {way: [asdict(run) for run in runs] for way, runs in self.runs.items()}
        shares = {
            "share": {way: self.share(way) for way in self.runs},
            "share_of_exposed": {way: self.share_of_exposed(way) for way in self.runs},
        }
        return {"plan": asdict(self.plan), "runs": runs, **shares, "goals": self.goals}


def measure_overlap(plan: Plan, cores: Sequence[int], environ: Mapping[str, str]) -> Result:
    """Start the workers, measure, stop them. Raises StackFailed, httpx.HTTPError."""
    prefill_cores, decode_cores = split_cores(cores, 2)
    with ExitStack() as stack:
        decode = stack.enter_context(_worker("decode", plan, decode_cores, environ, {}))
        prefills = {
            way: stack.enter_context(_worker("prefill", plan, prefill_cores, environ, own))
            for way, own in plan.ways().items()
        }
        http = stack.enter_context(httpx.Client(timeout=600, trust_env=False))
        rng = random.Random(plan.seed)
        runs: dict[str, list[Run]] = {way: [] for way in prefills}
        for number in range(-1, plan.runs):  # the first one warms up
            for way, prefill in prefills.items():
                prompt = [rng.randrange(_TOKENS) for _ in range(plan.prompt_tokens)]
                run = _hand_off(http, prefill, decode, prompt)
                if number >= 0:
                    runs[way].append(run)
        return Result(plan, runs)


def print_overlap(console: Console, result: Result) -> None:
    """The medians for people, then the goal."""
    plan = result.plan
    table = Table()
    table.add_column("overlap", no_wrap=True)
    for column in ("exposed", "min - max", "hidden", "GB/s", "of none", "of whole"):
        table.add_column(column, justify="right", no_wrap=True)
    for way, runs in result.runs.items():
        exposed = [run.exposed_ms for run in runs]
        table.add_row(
            way,
            f"{median(exposed):.2f}",
            f"{min(exposed):.1f} - {max(exposed):.1f}",
            f"{result.median_of(way, 'hidden_ms'):.2f}",
            f"{median(run.gb_per_s for run in runs):.2f}",
            f"{result.share_of_exposed(way):.1%}",
            f"{result.share(way):.1%}",
        )
    one = result.runs[NONE][0]
    what = f"{plan.prompt_tokens} tokens in {result.median_of(LAYERS, 'prefill_ms') / 1e3:.1f} s"
    what += f", {one.kv_bytes / 1e6:.1f} MB of KV over {one.transport}"
    show(console, f"{what}; medians of {plan.runs} runs, ms", table)
    for goal, is_met in result.goals.items():
        console.print(f"{'met   ' if is_met else 'MISSED'}  {goal}", highlight=False)


@contextmanager
def _worker(
    role: str, plan: Plan, cores: Sequence[int], environ: Mapping[str, str], own: Mapping[str, str]
) -> Iterator[str]:
    """A ready worker process; gives its URL."""
    command, url, chosen = worker_command(role, plan.model, SECRET)
    wanted = {
        "HANDOFF_CPUS": format_cores(cores),
        "HANDOFF_LOG_LEVEL": "warning",
        "HANDOFF_NUM_THREADS": plan.threads and str(plan.threads),
        "HANDOFF_DTYPE": plan.dtype,
        "HANDOFF_KV_TRANSPORTS": plan.transports,
    }
    chosen |= {name: value for name, value in wanted.items() if value}
    with spawned(command, {**environ, **chosen, **own}) as process:
        wait_until_ready(process, url, plan.start_timeout_s)
        yield url


def _hand_off(http: httpx.Client, prefill: str, decode: str, prompt: list[int]) -> Run:
    """One prompt by prefill, its KV to decode, and no more."""
    work: dict[str, Any] = {
        "request_id": "overlap",
        "token_ids": prompt,
        "num_prompt_tokens": len(prompt),
        "sampling": Sampling(temperature=0, max_tokens=2, ignore_eos=True),
        "timeout_s": 600.0,
    }
    with _asked(http, f"{decode}/v1/decode", DecodeRequest(**work)) as lines:
        reserved = DecodeEvent.model_validate_json(next(lines)).reserved
        if reserved is None:
            raise httpx.RemoteProtocolError("the decode worker did not begin with a reservation")
        with _asked(http, f"{prefill}/v1/prefill", PrefillRequest(**work, handoff=_whole(reserved))) as said:
            answer = list(said)  # read later: the first line comes in the midst of what is measured
        for _ in lines:  # the answer's second token: the KV was good
            pass
    events = [PrefillEvent.model_validate_json(line) for line in answer]
    first = next((event.first for event in events if event.first), None)
    sent = next((event.sent for event in events if event.sent), None)
    if first is None or sent is None:
        raise httpx.RemoteProtocolError(f"the hand-off failed: {events[-1].to_json().decode()}")
    return Run(
        exposed_ms=sent.transfer_s * 1e3,
        hidden_ms=sent.hidden_s * 1e3,
        prefill_ms=first.prefill_s * 1e3,
        kv_bytes=sent.kv_bytes,
        transport=sent.transport,
    )


def _whole(reserved: Handoff) -> Handoff:
    """The reservation; prompts are random, so decode holds nothing of them."""
    if reserved.have_tokens:
        raise httpx.RemoteProtocolError("the decode worker knew a prompt already: give another --seed")
    return reserved


@contextmanager
def _asked(http: httpx.Client, url: str, work: Wire) -> Iterator[Iterator[str]]:
    """The lines of a worker's answer."""
    headers = {"authorization": f"Bearer {SECRET}", "content-type": "application/json"}
    with http.stream("POST", url, content=work.to_json(), headers=headers) as response:
        response.raise_for_status()
        yield response.iter_lines()

"""The same single requests over two topologies in turn, and where each one's milliseconds went.

Prefill/decode split (pd) against one worker that does both (unified), one request at a time, never both at work.
Every run has a prompt of its own, so that no prefix cache flatters; within a run both get the same one. What is
compared is paired: ratios are taken per run, so that a slow moment of the machine does not count for one side.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from statistics import median

from loadtest.client import LoadClient, Request
from loadtest.metrics import RequestRecord, stage_medians_s
from loadtest.timing import STAGES, TOTAL
from loadtest.workload import synthetic
from services.cli.bench_stack import TOPOLOGIES, Topology

MAX_RATIO = 1.05
MAX_TRANSFER_MS = 10.0
TRANSFER_GOAL_TOKENS = 128
SPLIT = ("prefill", "transfer", "decode")


class BenchFailed(RuntimeError):
    """A request failed, or was not served the way that is being measured: there is no result."""


@dataclass(frozen=True, slots=True)
class Plan:
    """What to send: `runs` requests to each topology after `warmup` unmeasured ones."""

    prompt_tokens: int = 128
    output_tokens: int = 32
    runs: int = 5
    warmup: int = 1
    seed: int = 0


@dataclass(frozen=True, slots=True)
class Pair:
    """One prompt, answered by both."""

    pd: RequestRecord
    unified: RequestRecord

    @property
    def ratio(self) -> float:
        """PD end-to-end time (E2EL, by the client's clock) over unified."""
        return _e2el_s(self.pd) / _e2el_s(self.unified)

    @property
    def same_answer(self) -> bool:
        """Greedy answers are equal, token for token, wherever they were computed."""
        return self.pd.text == self.unified.text


@dataclass(frozen=True, slots=True)
class Spread:
    """Of one number over all runs."""

    median: float
    min: float
    max: float

    @classmethod
    def of(cls, values: Sequence[float]) -> Spread:
        """At least one value."""
        return cls(median(values), min(values), max(values))


@dataclass(frozen=True, slots=True)
class Result:
    """Medians per topology in milliseconds, the paired ratio, and what the transfer cost.

    transfer_ms: the exposed part only; hidden_transfer_ms overlapped prefill. Bytes are of one request.
    goals: name -> met; a goal that this prompt length does not test is absent.
    """

    plan: Plan
    stages_ms: dict[Topology, dict[str, float]]
    ttft_ms: dict[Topology, float | None]
    e2el_ms: dict[Topology, float]
    ratio: Spread
    transfer_ms: Spread | None
    hidden_transfer_ms: float | None
    kv_bytes: float | None
    wire_bytes: float | None
    transport: str | None
    same_answers: int
    goals: dict[str, bool]

    def to_dict(self) -> dict[str, object]:
        """Plain JSON types only."""
        return asdict(self)

    def split_ms(self) -> dict[str, float]:
        """The three-way split of PD, and `rest`: everything else up to the total."""
        stages_ms = self.stages_ms["pd"]
        split_ms = {stage: stages_ms.get(stage, 0.0) for stage in SPLIT}
        return {**split_ms, "rest": stages_ms.get(TOTAL, 0.0) - sum(split_ms.values())}


async def measure(urls: Mapping[Topology, str], plan: Plan, *, api_key: str | None = None) -> Result:
    """Send the plan to both stacks, A, B, A, B. Raises BenchFailed; httpx.HTTPError if no model is named."""
    prompts = synthetic(prompt_tokens=plan.prompt_tokens, max_tokens=plan.output_tokens, seed=plan.seed)
    async with (
        LoadClient(urls["pd"], api_key=api_key) as pd,
        LoadClient(urls["unified"], api_key=api_key) as unified,
    ):
        clients: dict[Topology, LoadClient] = {"pd": pd, "unified": unified}
        for _ in range(plan.warmup):
            await _pair(clients, prompts)
        pairs = [await _pair(clients, prompts) for _ in range(plan.runs)]
    return evaluate(plan, pairs)


async def _pair(clients: Mapping[Topology, LoadClient], prompts: Iterator[Request]) -> Pair:
    request = next(prompts)
    records = {topology: await clients[topology].send(request) for topology in TOPOLOGIES}
    for topology, record in records.items():
        check(record, topology, request)
    return Pair(**records)


def check(record: RequestRecord, topology: Topology, request: Request) -> None:
    """Refuse a record that does not measure what its column says. Raises BenchFailed."""
    facts = record.timing.facts
    if record.failure is not None:
        raise BenchFailed(f"{topology}: a request failed: {record.failure.kind}: {record.failure.detail}")
    if facts.get("topology", topology) != topology:
        raise BenchFailed(f"{topology}: a request was served {facts['topology']}")
    if topology == "pd" and record.timing.number("prompt_tokens_computed_on_decode"):
        raise BenchFailed("pd: the decode worker computed prompt tokens")
    if record.timing.number("cached_tokens"):
        hit = f"a prefix cache hit of {facts['cached_tokens']} tokens"
        raise BenchFailed(f"{topology}: {hit}; give another --seed")
    if record.timing.number("retries"):
        raise BenchFailed(f"{topology}: a request was retried")
    if record.output_tokens != request.max_tokens or record.e2el_s is None:
        raise BenchFailed(f"{topology}: {record.output_tokens} output tokens instead of {request.max_tokens}")


def evaluate(plan: Plan, pairs: Sequence[Pair]) -> Result:
    """What the runs amount to; at least one pair."""
    columns: dict[Topology, list[RequestRecord]] = {
        "pd": [pair.pd for pair in pairs],
        "unified": [pair.unified for pair in pairs],
    }
    transfers_ms = [
        record.timing.stages_s["transfer"] * 1000
        for record in columns["pd"]
        if "transfer" in record.timing.stages_s
    ]
    ratio = Spread.of([pair.ratio for pair in pairs])
    transfer_ms = Spread.of(transfers_ms) if transfers_ms else None
    goals = {f"PD within {MAX_RATIO:g}x of unified": ratio.median <= MAX_RATIO}
    if transfer_ms is not None and plan.prompt_tokens == TRANSFER_GOAL_TOKENS:
        name = f"exposed transfer of {TRANSFER_GOAL_TOKENS} tokens under {MAX_TRANSFER_MS:g} ms"
        goals[name] = transfer_ms.median < MAX_TRANSFER_MS
    first = columns["pd"][0].timing
    return Result(
        plan=plan,
        stages_ms={
            topology: {stage: value_s * 1000 for stage, value_s in stage_medians_s(records).items()}
            for topology, records in columns.items()
        },
        ttft_ms={topology: _median_ms([r.ttft_s for r in records]) for topology, records in columns.items()},
        e2el_ms={
            topology: median(_e2el_s(record) for record in records) * 1000
            for topology, records in columns.items()
        },
        ratio=ratio,
        transfer_ms=transfer_ms,
        hidden_transfer_ms=_median_or_none([r.timing.number("hidden_transfer_ms") for r in columns["pd"]]),
        kv_bytes=first.number("kv_bytes"),
        wire_bytes=first.number("wire_bytes"),
        transport=first.facts.get("transport"),
        same_answers=sum(pair.same_answer for pair in pairs),
        goals=goals,
    )


def stage_rows(result: Result) -> list[str]:
    """The stages that some topology reported, in order, then `unaccounted` and `total`."""
    seen = {stage for stages_ms in result.stages_ms.values() for stage in stages_ms}
    return [stage for stage in (*STAGES, "unaccounted", TOTAL) if stage in seen]


def _e2el_s(record: RequestRecord) -> float:
    assert record.e2el_s is not None
    return record.e2el_s


def _median_or_none(values: Sequence[float | None]) -> float | None:
    known = [value for value in values if value is not None]
    return median(known) if known else None


def _median_ms(values_s: Sequence[float | None]) -> float | None:
    middle_s = _median_or_none(values_s)
    return None if middle_s is None else middle_s * 1000

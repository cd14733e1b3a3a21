"""What one request measured, and what many of them amount to. Names and definitions are the glossary's.

TTFT: client send to first non-empty token text received. ITL: each gap between received pieces of text,
pooled over all requests. TPOT, per request: (E2EL - TTFT) / (output tokens - 1). E2EL: client send to last
token. Goodput: requests/s that meet every SLO. Failed requests count only in `failures`: no latency is
taken from them.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, field
from statistics import fmean, median

from loadtest.timing import STAGES, TOTAL, ServerTiming

PERCENTILES = (50, 90, 99)


@dataclass(frozen=True, slots=True)
class Failure:
    """Why a request does not count. kind groups (`status_429`, `cut_stream`, ...); detail is for people."""

    kind: str
    detail: str


@dataclass(frozen=True, slots=True)
class RequestRecord:
    """One request as its client saw it, on one monotonic clock.

    started_s, ended_s: readings of that clock; only differences mean anything.
    late_s: how long after its planned time it was sent (the load generator's own fault).
    ttft_s: None if no text came. e2el_s: None if no token came. itl_s: one gap per piece of text after the
    first.
    output_tokens: from `usage`; None if the server did not send it.
    """

    started_s: float
    ended_s: float
    failure: Failure | None = None
    ttft_s: float | None = None
    e2el_s: float | None = None
    itl_s: tuple[float, ...] = ()
    prompt_tokens: int | None = None
    output_tokens: int | None = None
    finish_reason: str | None = None
    text: str = ""
    timing: ServerTiming = field(default_factory=ServerTiming)
    late_s: float = 0.0

    @property
    def tpot_s(self) -> float | None:
        """Mean seconds per output token after the first; None below two tokens.

        Source: vLLM benchmarks/serve.py, (E2EL - TTFT) / (n - 1).
        """
        if self.ttft_s is None or self.e2el_s is None or (self.output_tokens or 0) < 2:
            return None
        return (self.e2el_s - self.ttft_s) / ((self.output_tokens or 0) - 1)


@dataclass(frozen=True, slots=True)
class SLO:
    """Limits that a request must keep to count as goodput. None: no limit on that number."""

    ttft_s: float | None = None
    tpot_s: float | None = None
    e2el_s: float | None = None

    def met_by(self, record: RequestRecord) -> bool:
        """A failed request meets nothing. A number that does not exist (TPOT of one token) breaks none."""
        if record.failure is not None:
            return False
        pairs = (
            (record.ttft_s, self.ttft_s),
            (record.tpot_s, self.tpot_s),
            (record.e2el_s, self.e2el_s),
        )
        return all(value is None or limit is None or value <= limit for value, limit in pairs)


@dataclass(frozen=True, slots=True)
class Distribution:
    """Percentiles and mean of one number, in milliseconds. Every field is None if nothing was measured."""

    num: int
    mean_ms: float | None
    p50_ms: float | None
    p90_ms: float | None
    p99_ms: float | None

    @classmethod
    def of(cls, values_s: Iterable[float]) -> Distribution:
        """Of values in seconds, in any order."""
        ordered = sorted(values_s)
        if not ordered:
            return cls(0, None, None, None, None)
        p50_ms, p90_ms, p99_ms = (percentile(ordered, p) * 1000 for p in PERCENTILES)
        return cls(len(ordered), fmean(ordered) * 1000, p50_ms, p90_ms, p99_ms)


@dataclass(frozen=True, slots=True)
class Summary:
    """What a run amounts to. Rates are over `duration_s`, first send to last end; tokens are of successes."""

    duration_s: float
    num_requests: int
    num_succeeded: int
    failures: dict[str, int]
    prompt_tokens: int
    output_tokens: int
    requests_per_s: float
    output_tokens_per_s: float
    slo: SLO
    goodput_per_s: float
    max_late_ms: float
    ttft: Distribution
    itl: Distribution
    tpot: Distribution
    e2el: Distribution
    stages_ms: dict[str, float]

    def to_dict(self) -> dict[str, object]:
        """Plain JSON types only."""
        return asdict(self)


def percentile(ordered: Sequence[float], p: float) -> float:
    """The p-th percentile (0 <= p <= 100) of values in ascending order, by linear interpolation.

    With n values it lies at rank (n - 1) * p / 100, counted from 0; between two ranks, on the straight line
    between their values (Hyndman and Fan's definition 7, numpy's default). Raises ValueError for no values
    or a p outside.
    """
    if not ordered or not 0 <= p <= 100:
        raise ValueError("a percentile needs at least one value and 0 <= p <= 100")
    rank = (len(ordered) - 1) * p / 100
    low, high = math.floor(rank), math.ceil(rank)
    return ordered[low] + (ordered[high] - ordered[low]) * (rank - low)


def stage_medians_s(records: Iterable[RequestRecord]) -> dict[str, float]:
    """Median seconds of each stage over the successes that report it, then `unaccounted` and `total`."""
    timings = [record.timing for record in records if record.failure is None]
    columns: dict[str, list[float]] = {
        stage: [timing.stages_s[stage] for timing in timings if stage in timing.stages_s] for stage in STAGES
    }
    columns["unaccounted"] = [t.unaccounted_s for t in timings if t.unaccounted_s is not None]
    columns[TOTAL] = [t.total_s for t in timings if t.total_s is not None]
    return {stage: median(values) for stage, values in columns.items() if values}


def summarise(records: Sequence[RequestRecord], slo: SLO | None = None) -> Summary:
    """Everything that a report says about these requests. Without limits, goodput counts every success."""
    slo = slo or SLO()
    succeeded = [record for record in records if record.failure is None]
    duration_s = 0.0
    if records:
        duration_s = max(r.ended_s for r in records) - min(r.started_s for r in records)
    output_tokens = sum(record.output_tokens or 0 for record in succeeded)

    def per_s(amount: float) -> float:
        return amount / duration_s if duration_s > 0 else 0.0

    return Summary(
        duration_s=duration_s,
        num_requests=len(records),
        num_succeeded=len(succeeded),
        failures=dict(Counter(r.failure.kind for r in records if r.failure is not None).most_common()),
        prompt_tokens=sum(record.prompt_tokens or 0 for record in succeeded),
        output_tokens=output_tokens,
        requests_per_s=per_s(len(succeeded)),
        output_tokens_per_s=per_s(output_tokens),
        slo=slo,
        goodput_per_s=per_s(sum(slo.met_by(record) for record in succeeded)),
        max_late_ms=max((record.late_s for record in records), default=0.0) * 1000,
        ttft=Distribution.of(r.ttft_s for r in succeeded if r.ttft_s is not None),
        itl=Distribution.of(gap_s for r in succeeded for gap_s in r.itl_s),
        tpot=Distribution.of(r.tpot_s for r in succeeded if r.tpot_s is not None),
        e2el=Distribution.of(r.e2el_s for r in succeeded if r.e2el_s is not None),
        stages_ms={stage: value_s * 1000 for stage, value_s in stage_medians_s(records).items()},
    )

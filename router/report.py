"""What one relay measured and counted, and its form in response headers and in a stream's last comment."""

from __future__ import annotations

from dataclasses import dataclass, field
from time import perf_counter
from typing import Any, Literal

from router.timing import AT_FIRST_TOKEN, Stages, header_text, server_timing
from shared.wire import Finish


@dataclass(slots=True)
class Way:
    """The way that the answer took: workers, stages and what was moved. A retried request tells its last try's."""

    topology: Literal["pd", "unified"] = "pd"
    stages: Stages = field(default_factory=Stages)
    prefill_worker: str | None = None
    decode_worker: str | None = None
    transport: str | None = None
    kv_bytes: int = 0
    wire_bytes: int = 0
    kv_wire: str | None = None
    hidden_s: float = 0.0
    prompt_tokens_computed_on_decode: int = 0
    entered_at: float | None = None
    injected_at: float | None = None

    @property
    def transfer_gb_per_s(self) -> float:
        """10^9 bytes of blob a second, over exposed and hidden time; 0 if nothing was transferred."""
        transfer_s = self.stages.transfer + self.hidden_s
        return self.wire_bytes / 1e9 / transfer_s if transfer_s else 0.0

    def injected(self) -> None:
        """KV is at decode, as far as the router can see."""
        if self.injected_at is None:
            self.injected_at = perf_counter()

    def decoding(self) -> None:
        """Tokens came: what the router itself sees of decode, until the worker tells its own measure at the end.

        An answer that a stop string ends is cancelled, and has no other measure.
        """
        self.injected()
        now = perf_counter()
        if self.injected_at is not None:
            self.stages.decode = now - self.injected_at
        self.left(now)

    def finished(self, finish: Finish) -> None:
        """Decode told what it measured."""
        self.kv_bytes = finish.kv_bytes_received
        self.prompt_tokens_computed_on_decode = finish.prompt_tokens_computed
        self.stages.decode_queue = finish.decode_queue_s
        self.stages.decode = finish.decode_s

    def entered(self) -> None:
        """From here on the workers' stages run: reservation granted, or placement chosen if there is none."""
        self.entered_at = perf_counter()

    def left(self, at: float) -> None:
        """The workers' last word came `at` this time: what they did not measure was spent on the way.

        Never below zero: workers that measure too much must show as a sum above the total.
        """
        stages = self.stages
        if self.entered_at is not None:
            inside = stages.queue + stages.prefill + stages.transfer + stages.decode_queue + stages.decode
            stages.relay = max(0.0, at - self.entered_at - inside)


@dataclass(slots=True)
class Report:
    """Counts of one prompt. completion_tokens: over all its choices, as the workers sampled them."""

    prompt_tokens: int
    cached_tokens: int = 0
    completion_tokens: int = 0
    retries: int = 0
    way: Way = field(default_factory=Way)


def combined(reports: list[Report], *, total_s: float) -> Report:
    """One report for all prompts of a request: counts are added, the way is that of the one that ended last.

    reports: in the order in which they ended.
    """
    last = reports[-1].way
    last.stages.total = total_s
    return Report(
        prompt_tokens=sum(r.prompt_tokens for r in reports),
        cached_tokens=sum(r.cached_tokens for r in reports),
        completion_tokens=sum(r.completion_tokens for r in reports),
        retries=sum(r.retries for r in reports),
        way=last,
    )


def headers(report: Report, *, at_first_token: bool) -> dict[str, str]:
    """Server-Timing and X-Handoff-* headers; at the first token only those that are known then."""
    way = report.way
    found = {
        "server-timing": server_timing(way.stages, known=AT_FIRST_TOKEN if at_first_token else None),
        "x-handoff-topology": way.topology,
        "x-handoff-cached-tokens": str(report.cached_tokens),
        "x-handoff-retries": str(report.retries),
    }
    if way.prefill_worker is not None:
        found["x-handoff-prefill-worker"] = header_text(way.prefill_worker)
    if way.decode_worker is not None:
        found["x-handoff-decode-worker"] = header_text(way.decode_worker)
    if not at_first_token:
        found["x-handoff-kv-bytes"] = str(way.kv_bytes)
        found["x-handoff-wire-bytes"] = str(way.wire_bytes)
        found["x-handoff-kv-wire"] = header_text(way.kv_wire or "none")
        found["x-handoff-transport"] = header_text(way.transport or "none")
        found["x-handoff-prompt-tokens-computed-on-decode"] = str(way.prompt_tokens_computed_on_decode)
        found["x-handoff-hidden-transfer-ms"] = f"{way.hidden_s * 1e3:.3f}"
        found["x-handoff-transfer-gb-per-s"] = f"{way.transfer_gb_per_s:.3f}"
    return found


def as_dict(report: Report) -> dict[str, Any]:
    """The whole report as plain values, for the last event of a stream and the usage chunk."""
    way = report.way
    return {
        "stages_ms": way.stages.as_ms(),
        "topology": way.topology,
        "prefill_worker": None if way.prefill_worker is None else header_text(way.prefill_worker),
        "decode_worker": None if way.decode_worker is None else header_text(way.decode_worker),
        "transport": header_text(way.transport or "none"),
        "kv_bytes": way.kv_bytes,
        "wire_bytes": way.wire_bytes,
        "kv_wire": header_text(way.kv_wire or "none"),
        "hidden_transfer_ms": round(way.hidden_s * 1e3, 3),
        "transfer_gb_per_s": round(way.transfer_gb_per_s, 3),
        "prompt_tokens_computed_on_decode": way.prompt_tokens_computed_on_decode,
        "cached_tokens": report.cached_tokens,
        "retries": report.retries,
    }

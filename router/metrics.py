"""The router's metrics and its one canonical line per request."""

from __future__ import annotations

from collections.abc import Callable

from router.openai.responses import Usage
from router.report import Report
from router.timing import STAGES
from shared.observability import Metrics, canonical_line

STAGE_BUCKETS_S = (
    0.001,
    0.0025,
    0.005,
    0.01,
    0.025,
    0.05,
    0.1,
    0.25,
    0.5,
    1.0,
    2.5,
    5.0,
    10.0,
    30.0,
    60.0,
    300.0,
)


class RouterMetrics:
    """Counts requests when they end, whatever ended them."""

    def __init__(
        self, metrics: Metrics, *, in_flight: Callable[[], float], relays: Callable[[], float]
    ) -> None:
        self._requests = metrics.counter(
            "requests", "Requests by ending: ok, client_gone or an error code", ["endpoint", "ending"]
        )
        stages = metrics.histogram(
            "stage_seconds", "Time of answered requests by stage", ["stage"], buckets=STAGE_BUCKETS_S
        )
        self._stages = {name: stages.labels(name) for name in STAGES}
        self._ttft = metrics.histogram(
            "first_token_seconds", "Request read to first token at the router", buckets=STAGE_BUCKETS_S
        )
        tokens = metrics.counter("tokens", "Tokens of ended requests: prompt, cached, completion", ["kind"])
        self._prompt_tokens, self._cached_tokens, self._completion_tokens = map(
            tokens.labels, ("prompt", "cached", "completion")
        )
        self._kv_bytes = metrics.counter(
            "kv_bytes", "Tensor bytes of KV that were handed over for ended requests"
        )
        self._retries = metrics.counter("retries", "Tries that failed and were repeated")
        metrics.gauge("in_flight", "Prompts being served", read=in_flight)
        metrics.gauge("relays", "Relays that hold anything at a worker, or wait for room", read=relays)

    def ended(
        self,
        endpoint: str,
        ending: str,
        *,
        stream: bool,
        num_choices: int,
        first_token_s: float | None,
        usage: Usage,
        report: Report,
    ) -> None:
        """Count one request and write its line."""
        stages_ms = report.way.stages.as_ms()
        self._requests.labels(endpoint, ending).inc()
        self._prompt_tokens.inc(usage.prompt_tokens)
        self._cached_tokens.inc(usage.cached_tokens)
        self._completion_tokens.inc(usage.completion_tokens)
        self._kv_bytes.inc(report.way.kv_bytes)
        self._retries.inc(report.retries)
        if first_token_s is not None:
            self._ttft.observe(first_token_s)
        if ending == "ok":
            for stage, ms in stages_ms.items():
                self._stages[stage].observe(ms / 1e3)
        canonical_line(
            "completion",
            endpoint=endpoint,
            ending=ending,
            stream=stream,
            choices=num_choices,
            prompt_tokens=usage.prompt_tokens,
            cached_tokens=usage.cached_tokens,
            completion_tokens=usage.completion_tokens,
            retries=report.retries,
            topology=report.way.topology,
            prefill_worker=report.way.prefill_worker,
            decode_worker=report.way.decode_worker,
            kv_bytes=report.way.kv_bytes,
            wire_bytes=report.way.wire_bytes,
            hidden_transfer_s=report.way.hidden_s,
            transfer_gb_per_s=round(report.way.transfer_gb_per_s, 3),
            first_token_s=first_token_s,
            **{f"{stage}_s": round(ms / 1e3, 6) for stage, ms in stages_ms.items()},
        )

    def refused(self, endpoint: str, code: str) -> None:
        """Count a request that never got to a worker; its access line tells the rest."""
        self._requests.labels(endpoint, code).inc()

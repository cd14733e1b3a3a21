"""What a prefill worker counts beside its engine."""

from __future__ import annotations

from shared.observability import Metrics
from shared.wire import Sent

TRANSFER_BUCKETS_S = (0.0005, 0.001, 0.002, 0.005, 0.01, 0.02, 0.05, 0.1, 0.2, 0.5, 1.0, 5.0)


class PrefillMetrics:
    """Requests by ending, and what travelled."""

    def __init__(self, metrics: Metrics) -> None:
        self._requests = metrics.counter("prefill_requests", "Prefill requests by ending", ["ending"])
        self._kv_bytes = metrics.counter("kv_sent_bytes", "Bytes of K and V sent and injected", ["transport"])
        self._wire_bytes = metrics.counter(
            "kv_sent_wire_bytes", "Bytes of the blobs that they were sent in", ["transport", "kv_wire"]
        )
        self._transfer_s = metrics.histogram(
            "transfer_seconds", "Exposed part of the KV transfer", buckets=TRANSFER_BUCKETS_S
        )

    def ended(self, ending: str) -> None:
        """ok, client_gone, or an error code."""
        self._requests.labels(ending).inc()

    def sent(self, sent: Sent) -> None:
        """One hand-off was injected."""
        self._kv_bytes.labels(sent.transport).inc(sent.kv_bytes)
        self._wire_bytes.labels(sent.transport, sent.kv_wire or "none").inc(sent.wire_bytes)
        self._transfer_s.observe(sent.transfer_s)

"""What a decode worker counts beside its engine."""

from __future__ import annotations

from collections.abc import Callable

from shared.kv.put import PutReport
from shared.observability import Metrics


class DecodeMetrics:
    """Requests by ending, transfers by status, bytes received, open reservations."""

    def __init__(self, metrics: Metrics, num_reservations: Callable[[], int]) -> None:
        self._requests = metrics.counter("decode_requests", "Decode requests by ending", ["ending"])
        self._puts = metrics.counter("kv_puts", "KV transfers by HTTP status", ["status", "transport"])
        self._kv_bytes = metrics.counter(
            "kv_received_bytes", "Bytes of K and V verified and injected", ["transport"]
        )
        self._wire_bytes = metrics.counter(
            "kv_received_wire_bytes", "Bytes of the blobs that brought them", ["transport", "kv_wire"]
        )
        metrics.gauge("reservations", "Reservations that can be filled or are", read=num_reservations)

    def ended(self, ending: str) -> None:
        """ok, client_gone, or an error code."""
        self._requests.labels(ending).inc()

    def put_ended(self, report: PutReport) -> None:
        """Called on the thread that served the PUT."""
        self._puts.labels(str(report.status), report.transport).inc()
        received = report.received
        if received is not None:
            self._kv_bytes.labels(report.transport).inc(received.kv_bytes)
            self._wire_bytes.labels(report.transport, received.kv_wire or "none").inc(received.wire_bytes)

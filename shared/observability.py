"""Logs and metrics: only the mechanism. Which events and metrics there are, their owners' modules say."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Awaitable, Callable, Sequence
from io import StringIO
from typing import Any, Literal, TextIO

import orjson
import structlog
from prometheus_client import (
    CollectorRegistry,
    Counter,
    Gauge,
    Histogram,
    PlatformCollector,
    ProcessCollector,
)
from prometheus_client.exposition import choose_encoder
from starlette.requests import Request
from starlette.responses import Response
from structlog.typing import EventDict, ExcInfo, Processor, WrappedLogger

from shared.asgi.text import printable

LogFormat = Literal["auto", "json", "console"]
NAMESPACE = "handoff"
_NOISY = ("httpx", "httpcore", "uvicorn.error", "uvicorn.access")
_log = structlog.get_logger(__name__)


def setup_logging(level: str = "info", fmt: LogFormat = "auto", *, service: str) -> None:
    """Send every log line of this process, structlog's and the standard library's, to stderr in one form.

    auto: for people on a terminal, else JSON, one object per line. `service` is on every JSON line. Stack
    traces never show local variables, which can hold prompts.
    """
    as_json = fmt == "json" or (fmt == "auto" and not sys.stderr.isatty())
    number = logging.getLevelNamesMapping()[level.upper()]

    def name_service(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
        event["service"] = service
        return event

    shared: list[Processor] = [
        structlog.contextvars.merge_contextvars,
        structlog.stdlib.add_logger_name,
        structlog.stdlib.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
    ]
    render: list[Processor]
    if as_json:
        shared.append(name_service)
        render = [structlog.processors.format_exc_info, structlog.processors.JSONRenderer(_dumps)]
    else:
        render = [_escape_controls, structlog.dev.ConsoleRenderer(exception_formatter=_safe_traceback)]
    handler = logging.StreamHandler(sys.stderr)
    handler.setFormatter(
        structlog.stdlib.ProcessorFormatter(
            foreign_pre_chain=shared,
            processors=[structlog.stdlib.ProcessorFormatter.remove_processors_meta, *render],
        )
    )
    root = logging.getLogger()
    root.handlers[:] = [handler]
    root.setLevel(number)
    for name in _NOISY:
        logging.getLogger(name).setLevel(max(number, logging.WARNING))
    logging.captureWarnings(True)
    structlog.configure(
        processors=[
            structlog.stdlib.filter_by_level,
            *shared,
            structlog.stdlib.ProcessorFormatter.wrap_for_formatter,
        ],
        logger_factory=structlog.stdlib.LoggerFactory(),
        wrapper_class=structlog.stdlib.BoundLogger,
        cache_logger_on_first_use=False,
    )


def canonical_line(event: str, **facts: Any) -> None:
    """The one line that tells a request's whole story in this process. Facts that are None are left out."""
    known = {name: value for name, value in facts.items() if value is not None}
    _log.info(event, **{n: round(v, 6) if isinstance(v, float) else v for n, v in known.items()})


class Metrics:
    """One process's metrics, in a registry of its own. Names get the prefix `handoff_`."""

    def __init__(self, *, process: bool = True) -> None:
        self.registry = CollectorRegistry()
        if process:
            ProcessCollector(registry=self.registry)
            PlatformCollector(registry=self.registry)

    def counter(self, name: str, help_text: str, labels: Sequence[str] = ()) -> Counter:
        """A number that only grows; `_total` is added to its name."""
        return Counter(name, help_text, labels, namespace=NAMESPACE, registry=self.registry)

    def gauge(
        self,
        name: str,
        help_text: str,
        labels: Sequence[str] = (),
        *,
        read: Callable[[], float] | None = None,
    ) -> Gauge:
        """A number that goes up and down. `read` is called at each scrape, and takes no labels."""
        gauge = Gauge(name, help_text, labels, namespace=NAMESPACE, registry=self.registry)
        if read is not None:
            gauge.set_function(read)
        return gauge

    def histogram(
        self, name: str, help_text: str, labels: Sequence[str] = (), *, buckets: Sequence[float]
    ) -> Histogram:
        """A distribution, counted in the cumulative `buckets` (upper bounds, ascending)."""
        return Histogram(
            name, help_text, labels, namespace=NAMESPACE, registry=self.registry, buckets=buckets
        )

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """Every metric as text, and its content type, in the format that `accept` prefers."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type


def metrics_endpoint(metrics: Metrics) -> Callable[[Request], Awaitable[Response]]:
    """The handler of `GET /metrics`."""

    async def endpoint(request: Request) -> Response:
        body, content_type = metrics.render(request.headers.get("accept", ""))
        return Response(body, headers={"content-type": content_type})

    return endpoint


def _escape_controls(_logger: WrappedLogger, _method: str, event: EventDict) -> EventDict:
    """Texts can be a client's: a terminal shows its escapes and line ends, and does not obey them."""
    return {key: printable(value) if isinstance(value, str) else value for key, value in event.items()}


def _safe_traceback(out: TextIO, exc_info: ExcInfo) -> None:
    """The plain traceback; an exception's own text can be a client's too."""
    plain = StringIO()
    structlog.dev.plain_traceback(plain, exc_info)
    out.write("\n".join(map(printable, plain.getvalue().split("\n"))))


def _dumps(event: object, **_: object) -> str:
    try:
        return orjson.dumps(event, default=repr, option=orjson.OPT_NON_STR_KEYS).decode()
    except TypeError:  # text that is no UTF-8, or a number beyond 64 bits; a line must not be lost for that
        return json.dumps(event, default=repr)

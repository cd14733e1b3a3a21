"""Logs are one JSON object per line; metrics live in their own registry."""

from __future__ import annotations

import json
import logging
import subprocess
import sys
from collections.abc import Iterator

import pytest
import structlog

from shared.observability import Metrics, canonical_line, setup_logging


@pytest.fixture(autouse=True)
def _restore_logging() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    root.handlers[:] = handlers
    root.setLevel(level)
    logging.captureWarnings(False)
    structlog.reset_defaults()
    structlog.contextvars.clear_contextvars()


def _lines(capsys: pytest.CaptureFixture[str]) -> list[dict[str, object]]:
    return [json.loads(line) for line in capsys.readouterr().err.splitlines()]


def test_auto_means_json_where_no_terminal_is(capsys: pytest.CaptureFixture[str]) -> None:
    """A line carries event, level, time, service, and what is bound to the context."""
    setup_logging("info", "auto", service="prefill")
    structlog.contextvars.bind_contextvars(request_id="req-1")
    canonical_line("request_done", ending="ok", total_s=0.12345678, absent=None)
    (line,) = _lines(capsys)
    assert {
        "event": "request_done",
        "service": "prefill",
        "level": "info",
        "request_id": "req-1",
        "ending": "ok",
        "total_s": 0.123457,
    }.items() <= line.items()
    assert "absent" not in line
    assert str(line["timestamp"]).endswith("Z")


def test_the_standard_library_logs_in_the_same_form(capsys: pytest.CaptureFixture[str]) -> None:
    """uvicorn's errors are lines like ours; httpx is quiet below a warning."""
    setup_logging("debug", "json", service="router")
    logging.getLogger("uvicorn.error").error("broken %d", 7)
    logging.getLogger("httpx").info("HTTP Request: GET http://inner:1/")
    (line,) = _lines(capsys)
    assert ("broken 7", "uvicorn.error", "router") == (line["event"], line["logger"], line["service"])


def test_a_level_hides_what_is_below_it(capsys: pytest.CaptureFixture[str]) -> None:
    """At warning an info line is not written."""
    setup_logging("warning", "json", service="router")
    structlog.get_logger("x").info("hidden")
    structlog.get_logger("x").warning("shown")
    assert ["shown"] == [line["event"] for line in _lines(capsys)]


@pytest.mark.parametrize("fmt", ["json", "console"])
def test_a_stack_trace_shows_no_local_variables(fmt: str, capsys: pytest.CaptureFixture[str]) -> None:
    """They can hold a prompt."""
    setup_logging("info", fmt, service="router")  # type: ignore[arg-type]

    def fail(prompt: str) -> None:
        raise RuntimeError(f"length {len(prompt)}")

    try:
        fail("my" + "secret" + "text")
    except RuntimeError:
        structlog.get_logger("x").exception("failed")
    text = capsys.readouterr().err
    assert "RuntimeError: length 12" in text
    assert "mysecrettext" not in text


def test_the_console_does_not_obey_what_a_client_wrote(capsys: pytest.CaptureFixture[str]) -> None:
    """Terminal escapes are shown, in facts, in the event and in an exception's text, whose lines stay lines."""
    setup_logging("info", "console", service="router")
    evil = "\x1b[2Jx\r\ny\x9b31m\x00\u2028"
    structlog.get_logger("x").info("request", path=evil)
    logging.getLogger("uvicorn.error").error(evil)
    try:
        raise ValueError(evil)
    except ValueError:
        structlog.get_logger("x").exception("failed")
    text = capsys.readouterr().err
    assert not {"\r", "\x9b", "\x00", "\u2028"} & set(text)
    assert "\x1b[2J" not in text
    assert 2 == text.count(r"x\r\ny\x9b31m\x00\u2028")
    assert "Traceback" in text


def test_text_that_is_no_utf8_does_not_stop_a_line(capsys: pytest.CaptureFixture[str]) -> None:
    """A lone surrogate from a request must not make logging fail."""
    setup_logging("info", "json", service="router")
    structlog.get_logger("x").info("odd", path="/\ud800", obj=object())
    (line,) = _lines(capsys)
    assert "odd" == line["event"]


def test_metrics_of_two_processes_in_one_do_not_meet() -> None:
    """Each Metrics has its own registry, so a name can exist twice, and nothing global is touched."""
    one, two = Metrics(process=False), Metrics(process=False)
    one.counter("requests", "Requests.", ["ending"]).labels("ok").inc()
    two.counter("requests", "Requests.", ["ending"]).labels("ok").inc(2)
    assert b'handoff_requests_total{ending="ok"} 1.0' in one.render()[0]
    assert b'handoff_requests_total{ending="ok"} 2.0' in two.render()[0]


def test_gauges_can_be_read_at_scrape_and_histograms_have_given_buckets() -> None:
    """The mechanism hands everything on to the registry."""
    metrics = Metrics(process=False)
    metrics.gauge("blocks_live", "Blocks.", read=lambda: 42)
    metrics.histogram("ttft_seconds", "TTFT.", buckets=(0.1, 1.0)).observe(0.5)
    text = metrics.render()[0].decode()
    assert "handoff_blocks_live 42.0" in text
    assert 'handoff_ttft_seconds_bucket{le="0.1"} 0.0' in text
    assert 'handoff_ttft_seconds_bucket{le="1.0"} 1.0' in text


def test_process_metrics_and_content_type() -> None:
    """Memory and open files are there, and a scraper's preferred format is honoured."""
    body, plain = Metrics().render()
    assert b"process_resident_memory_bytes" in body
    assert plain.startswith("text/plain")
    assert (
        Metrics()
        .render("application/openmetrics-text; version=1.0.0")[1]
        .startswith("application/openmetrics-text")
    )


def test_importing_does_nothing() -> None:
    """No handler, level or registry entry comes from the import alone."""
    code = (
        "import logging; before = logging.getLogger().handlers[:], logging.getLogger().level\n"
        "import shared.observability, shared.server\n"
        "assert before == (logging.getLogger().handlers, logging.getLogger().level)\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)

"""The report is readable, and its last line is one JSON object."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from loadtest.metrics import SLO, Failure, RequestRecord, summarise
from loadtest.report import json_line, ms, print_report
from loadtest.timing import ServerTiming


def test_the_last_line_is_the_whole_result() -> None:
    """Tables for people above, then one line that json reads, however narrow the terminal is."""
    timing = ServerTiming({"prefill": 0.02, "total": 0.05})
    ok = RequestRecord(0.0, 1.0, None, 0.5, 0.9, (0.4,), 8, 2, timing=timing)
    bad = RequestRecord(0.0, 1.0, Failure("status_429", "[busy]"))
    out = io.StringIO()
    console = Console(file=out, width=100, force_terminal=False)
    print_report(console, summarise([ok, bad], SLO(ttft_s=0.6)), {"url": "http://x", "workload": "[closed]"})
    *tables, line = out.getvalue().splitlines()
    result = json.loads(line)
    assert (result["url"], result["failures"], result["ttft"]["p50_ms"]) == (
        "http://x",
        {"status_429": 1},
        500.0,
    )
    text = "\n".join(tables)
    for word in (
        "TTFT",
        "ITL (pooled)",
        "TPOT",
        "E2EL",
        "goodput",
        "TTFT <= 600 ms",
        "prefill",
        "status_429",
    ):
        assert word in text


def test_numbers_are_rounded_to_what_they_mean() -> None:
    """Three digits or so, and a dash for nothing."""
    assert [ms(v) for v in (None, 0.123, 12.34, 1234.4, -0.5)] == ["-", "0.12", "12.3", "1234", "-0.50"]


def test_nan_is_no_json() -> None:
    """A number that is none must not reach a machine."""
    with pytest.raises(ValueError, match="JSON"):
        json_line({"x": float("nan")})

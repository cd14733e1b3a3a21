"""A summary for people, as tables, and for machines, as one JSON line after them."""

from __future__ import annotations

import json
from collections.abc import Mapping

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from loadtest.metrics import Distribution, Summary


def print_report(console: Console, summary: Summary, facts: Mapping[str, object]) -> None:
    """Tables, then the JSON line. facts: what was sent (workload, url, seed, scale of a trace, ...)."""
    show(console, "Load test", _overview(summary, facts))
    show(console, "Latency of successful requests, ms", _latencies(summary))
    if summary.stages_ms:
        show(console, "Stages, by the server", _stages(summary.stages_ms))
    if summary.failures:
        show(console, "Failures", _failures(summary.failures))
    print_json_line(console, {**facts, **summary.to_dict()})


def print_json_line(console: Console, content: Mapping[str, object]) -> None:
    """One unwrapped, uncoloured line: `tail -n 1` is the whole result."""
    console.print(json_line(content), soft_wrap=True, markup=False, highlight=False)


def json_line(content: Mapping[str, object]) -> str:
    """Compact JSON in the order given. Raises ValueError for NaN and infinity, which are no JSON."""
    return json.dumps(content, allow_nan=False, separators=(",", ":"))


def ms(value: float | None) -> str:
    """Milliseconds with as many digits as mean something; a dash for what was not measured."""
    if value is None:
        return "-"
    return f"{value:.0f}" if abs(value) >= 1000 else f"{value:.1f}" if abs(value) >= 10 else f"{value:.2f}"


def show(console: Console, title: str, table: Table) -> None:
    """A table under its title, which may be wider than it."""
    console.print(f"\n{title}", style="bold", markup=False, highlight=False)
    console.print(table)


def two_columns(left: str, right: str) -> Table:
    """An empty table of names and numbers."""
    table = Table()
    table.add_column(left)
    table.add_column(right, justify="right")
    return table


def _overview(summary: Summary, facts: Mapping[str, object]) -> Table:
    table = two_columns("what", "value")
    for name, value in facts.items():
        table.add_row(escape(name), escape(str(value)))
    table.add_section()
    table.add_row("requests", f"{summary.num_requests} sent, {summary.num_succeeded} succeeded")
    table.add_row("duration (s)", f"{summary.duration_s:.2f}")
    table.add_row("prompt / output tokens", f"{summary.prompt_tokens} / {summary.output_tokens}")
    table.add_row("requests/s", f"{summary.requests_per_s:.2f}")
    table.add_row("output tokens/s", f"{summary.output_tokens_per_s:.1f}")
    table.add_row(f"goodput, requests/s ({_limits(summary)})", f"{summary.goodput_per_s:.2f}")
    table.add_row("latest send behind plan (ms)", ms(summary.max_late_ms))
    return table


def _limits(summary: Summary) -> str:
    slo = summary.slo
    pairs = (("TTFT", slo.ttft_s), ("TPOT", slo.tpot_s), ("E2EL", slo.e2el_s))
    limits = [f"{name} <= {limit_s * 1000:g} ms" for name, limit_s in pairs if limit_s is not None]
    return ", ".join(limits) or "no limits set"


def _latencies(summary: Summary) -> Table:
    table = Table()
    table.add_column("number")
    for column in ("n", "mean", "p50", "p90", "p99"):
        table.add_column(column, justify="right")
    rows: tuple[tuple[str, Distribution], ...] = (
        ("TTFT", summary.ttft),
        ("ITL (pooled)", summary.itl),
        ("TPOT", summary.tpot),
        ("E2EL", summary.e2el),
    )
    for name, d in rows:
        table.add_row(name, str(d.num), ms(d.mean_ms), ms(d.p50_ms), ms(d.p90_ms), ms(d.p99_ms))
    return table


def _stages(stages_ms: Mapping[str, float]) -> Table:
    table = two_columns("stage", "median ms")
    for stage, value_ms in stages_ms.items():
        table.add_row(stage, ms(value_ms))
    return table


def _failures(failures: Mapping[str, int]) -> Table:
    table = two_columns("kind", "requests")
    for kind, count in failures.items():
        table.add_row(escape(kind), str(count))
    return table

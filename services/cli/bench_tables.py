"""The result of `handoff bench stages` for people: stages side by side, the split, and the goals."""

from __future__ import annotations

from rich.console import Console
from rich.table import Table

from loadtest.report import ms, show, two_columns
from loadtest.timing import TOTAL
from services.cli.bench_stack import TOPOLOGIES
from services.cli.bench_stages import Result, Spread, stage_rows


def print_result(console: Console, result: Result) -> None:
    """Everything but the JSON line."""
    plan = result.plan
    lengths = f"{plan.prompt_tokens} prompt and {plan.output_tokens} output tokens"
    show(console, f"Medians of {plan.runs} runs, ms; {lengths}", _stages(result))
    show(console, "Where a PD request's time goes", _split(result))
    show(console, "PD against unified", _comparison(result))
    for goal, met in result.goals.items():
        console.print(f"goal: {goal}: {'met' if met else 'missed'}", highlight=False)


def _stages(result: Result) -> Table:
    table = Table()
    table.add_column("stage, by the server")
    for topology in TOPOLOGIES:
        table.add_column(topology, justify="right")
    for stage in stage_rows(result):
        if stage == TOTAL:
            table.add_section()
        table.add_row(stage, *(ms(result.stages_ms[topology].get(stage)) for topology in TOPOLOGIES))
    table.add_section()
    table.add_row("TTFT, by the client", *(ms(result.ttft_ms[topology]) for topology in TOPOLOGIES))
    table.add_row("E2EL, by the client", *(ms(result.e2el_ms[topology]) for topology in TOPOLOGIES))
    return table


def _split(result: Result) -> Table:
    total_ms = result.stages_ms["pd"].get(TOTAL)
    table = Table()
    for column in ("part", "ms", "share"):
        table.add_column(column, justify="left" if column == "part" else "right")
    for part, value_ms in result.split_ms().items():
        table.add_row(part, ms(value_ms), f"{value_ms / total_ms:.1%}" if total_ms else "-")
    return table


def _comparison(result: Result) -> Table:
    table = two_columns("what", "value")
    table.add_row("end-to-end, PD / unified: median of pairs (min - max)", _spread(result.ratio, ".3f"))
    transfer = "-" if result.transfer_ms is None else _spread(result.transfer_ms, ".2f")
    table.add_row("exposed transfer, ms: median (min - max)", transfer)
    table.add_row("hidden transfer, ms", ms(result.hidden_transfer_ms))
    table.add_row("KV / wire bytes per request", f"{_bytes(result.kv_bytes)} / {_bytes(result.wire_bytes)}")
    table.add_row("transport", result.transport or "-")
    table.add_row("equal answers", f"{result.same_answers} of {result.plan.runs}")
    return table


def _spread(spread: Spread, form: str) -> str:
    return f"{spread.median:{form}} ({spread.min:{form}} - {spread.max:{form}})"


def _bytes(value: float | None) -> str:
    return "-" if value is None else f"{value:,.0f}"

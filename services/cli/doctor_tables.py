"""What `handoff doctor` found: tables and plain words for people, one JSON line for programs."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import asdict
from typing import Any

from rich.console import Console
from rich.table import Table

from services.cli.doctor import Report, travels
from services.cli.doctor_model import Costs, Measured, break_even, costs, requests_per_s
from services.cli.kv_text import megabytes

_MARKS = {"ok": "ok", "note": "note", "problem": "PROBLEM"}


def print_doctor(out: Console, report: Report) -> None:
    """Everything, the verdict last."""
    findings = _table("", "what", "found")
    for finding in report.findings:
        findings.add_row(_MARKS[finding.level], finding.what, finding.text)
    out.print(findings)
    if report.transfers:
        out.print(_transfers(report))
    if report.seen is not None:
        out.print(_hosts(report))
    if report.measured is not None:
        out.print(_compute(report, report.measured))
        out.print(_mix(report, report.measured))
    for sentence in verdict(report):
        out.print(sentence)


def verdict(report: Report) -> Iterator[str]:
    """In plain words: healthy or not, and whether splitting pays."""
    problems = sum(finding.level == "problem" for finding in report.findings)
    if problems:
        yield f"NOT HEALTHY: {problems} problem{'s' if problems > 1 else ''}, see above."
    else:
        yield "Healthy: the two workers fit and KV gets across."
    measured, load = report.measured, report.plan.load
    if measured is None or report.seen is None:
        return
    longest = _longest(report)
    shortest = break_even(measured, load, longest)
    mix = f"with {load.running} answers of {load.output_tokens} tokens at a time"
    if shortest is None:
        yield f"Splitting does not pay here, at no prompt length up to {longest:,} tokens, {mix}."
    else:
        plural = "s" if shortest > 1 else ""
        yield f"Splitting pays from {shortest:,} prompt token{plural} on, {mix}."
    for num_tokens in report.plan.prompts:
        yield f"  {_sentence(costs(measured, load, num_tokens), report)}"


def doctor_as_json(report: Report) -> dict[str, Any]:
    """The same in seconds and bytes."""
    plan, measured = report.plan, report.measured
    result: dict[str, Any] = {
        "healthy": report.healthy,
        "prefill_url": plan.prefill_url,
        "decode_url": plan.decode_url,
        "findings": [asdict(finding) for finding in report.findings],
        "transports": [
            {
                "name": each.name,
                "problem": each.problem,
                "median_s": dict(each.medians()),
                "kv_wire": None if each.largest is None else each.largest.kv_wire,
                "wire_bytes": {size: sent[-1].wire_bytes for size, sent in sorted(each.sent.items())},
            }
            | (asdict(each.link) if each.link is not None else {})
            for each in report.transfers
        ],
        "transport": None if report.taken is None else report.taken.name,
        "workers": {
            seen.info.role: {
                "info": seen.info.model_dump(),
                "host": seen.host.model_dump(),
                "clock": asdict(seen.clock),
            }
            for seen in report.seen or ()
        },
        "stall": None if report.stall is None else asdict(report.stall),
        "load": asdict(plan.load),
        "measured": None if measured is None else asdict(measured),
        "break_even_tokens": None,
        "mix": [],
    }
    if measured is not None:
        result["break_even_tokens"] = break_even(measured, plan.load, _longest(report))
        result["mix"] = [
            asdict(cost) | {"pays": cost.pays}
            for cost in (costs(measured, plan.load, num_tokens) for num_tokens in plan.prompts)
        ]
    return result


def _longest(report: Report) -> int:
    assert report.seen is not None
    return min(seen.info.max_model_len for seen in report.seen) - 1


def _sentence(cost: Costs, report: Report) -> str:
    answers = report.plan.load.running / 2
    many = f"{answers:g} answers" if answers != 1 else "1 answer"
    return (
        f"{cost.prompt_tokens:,} tokens: computed where others decode it stops {many} for {_ms(cost.stall_s)} each "
        f"({_ms(cost.pause_s)} at once); splitting costs its own request {_ms(cost.split_s)}. "
        f"{'It pays.' if cost.pays else 'It does not pay.'}"
    )


def _transfers(report: Report) -> Table:
    table = _table("transport", "KV", "median", "GB/s", "fixed cost", "bandwidth", "KV travels")
    for each in report.transfers:
        if each.problem is not None:
            table.add_row(each.name, "-", "-", "-", "-", "-", "-")
        for index, (size, seconds) in enumerate(each.medians()):
            rest = (
                ("", "", "")
                if index or each.link is None or each.largest is None
                else (
                    _ms(each.link.fixed_s),
                    f"{each.link.bytes_per_s / 1e9:.2f} GB/s",
                    travels(each.largest),
                )
            )
            table.add_row(
                "" if index else each.name,
                megabytes(size),
                _ms(seconds),
                f"{size / seconds / 1e9:.2f}",
                *rest,
            )
    return table


def _hosts(report: Report) -> Table:
    table = _table("worker", "cores", "copy", "digest", "both at once", "chunk")
    for seen in report.seen or ():
        host = seen.host
        table.add_row(
            seen.info.name,
            str(len(host.cpus)),
            f"{host.copy_bytes_per_s / 1e9:.1f} GB/s",
            f"{host.digest_bytes_per_s / 1e9:.1f} GB/s",
            f"{host.both_bytes_per_s / 1e9:.1f} GB/s" if host.both_bytes_per_s else "no compiled code",
            f"{host.chunk_size} tokens" if host.chunk_size else "whole prompts",
        )
    return table


def _compute(report: Report, measured: Measured) -> Table:
    table = _table("compute", "time", "rate")
    for where, times in (("prefill", measured.remote_s), ("decode", measured.local_s)):
        for tokens, seconds in times.points:
            rate = f"{tokens / max(seconds, 1e-9):,.0f} tokens/s"
            table.add_row(f"prompt of {tokens:.0f} at {where}", _ms(seconds), rate)
    for answers, seconds in measured.step_s.points:
        rate = f"{answers / max(seconds, 1e-9):,.1f} tokens/s"
        table.add_row(f"decode step of {answers:.0f}", _ms(seconds), rate)
    table.add_row("reservation", _ms(measured.reserve_s), "")
    if report.stall is not None:
        stall = report.stall
        text = f"lost by an answer beside a prompt of {stall.prompt_tokens}"
        table.add_row(text, _ms(stall.total_s), f"{_ms(stall.longest_s)} at once")
    return table


def _mix(report: Report, measured: Measured) -> Table:
    table = _table(
        "prompt",
        "exposed transfer",
        "splitting costs",
        "stall of an answer",
        "not splitting costs",
        "requests/s",
    )
    for num_tokens in report.plan.prompts:
        cost = costs(measured, report.plan.load, num_tokens)
        split, unified = requests_per_s(measured, report.plan.load, num_tokens)
        table.add_row(
            f"{num_tokens:,}",
            _ms(cost.exposed_s),
            _ms(cost.split_s),
            _ms(cost.stall_s),
            _ms(cost.unified_s),
            f"{split:.2f} split, {unified:.2f} not",
        )
    return table


def _ms(seconds: float) -> str:
    return f"{seconds:,.2f} s" if seconds >= 10 else f"{seconds * 1e3:,.1f} ms"


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, overflow="fold")
    return table

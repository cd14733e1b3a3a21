"""The command line of `handoff doctor`."""

from __future__ import annotations

import asyncio
import json

import typer
from rich.console import Console

from services.cli.doctor import Plan, Report, examine
from services.cli.doctor_tables import doctor_as_json, print_doctor
from services.cli.kv_text import console


def run_doctor(plan: Plan, *, as_json: bool) -> int:
    """Examine, print, and the exit status. JSON alone goes to stdout if it is asked for; progress to stderr."""
    report = asyncio.run(_with_progress(plan))
    if not as_json:
        print_doctor(console(), report)
    typer.echo(json.dumps(doctor_as_json(report)))
    return 0 if report.healthy else 1


async def _with_progress(plan: Plan) -> Report:
    err = Console(stderr=True)
    if not err.is_terminal:
        return await examine(plan, lambda _: None)
    with err.status("beginning") as status:
        return await examine(plan, status.update)

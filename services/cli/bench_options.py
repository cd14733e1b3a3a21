"""What the commands of `handoff bench` share: options, the JSON file, and how they say that there is no result."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from loadtest.report import json_line
from services.cli.bench_stack import busy

ApiKey = Annotated[str | None, typer.Option(envvar="HANDOFF_API_KEY", help="Bearer token of requests.")]
JsonFile = Annotated[
    Path | None, typer.Option("--json", dir_okay=False, help="Write the result there as JSON too.")
]
Seed = Annotated[int, typer.Option(help="Seed of prompts and arrival times.")]


def look_at_cores(command: str) -> tuple[list[int], float]:
    """The cores to measure on, and the load average before; warns if that spoils the measurement."""
    cores = sorted(os.sched_getaffinity(0))
    load_average, warning = busy(cores)
    if warning is not None:
        typer.echo(f"handoff bench {command}: {warning}", err=True)
    return cores, load_average


def write_json(json_file: Path | None, content: Mapping[str, object]) -> None:
    """One line, if a file is wanted."""
    if json_file is not None:
        json_file.write_text(json_line(content) + "\n")


def no_result(command: str, exc: Exception) -> typer.Exit:
    """Say why there is none; to be raised."""
    typer.echo(f"handoff bench {command}: {exc}", err=True)
    return typer.Exit(1)

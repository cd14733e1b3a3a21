"""What the commands of `handoff bench` share: options, the JSON file, and how they say that there is no result."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Annotated

import typer

from loadtest.report import json_line
from services.cli.bench_stack import busy

MAX_NUMBER = 1_000_000
"""Of requests, tokens, runs: far above what makes sense, far below what breaks a library."""


def _writable(json_file: Path | None) -> Path | None:
    """Raises typer.BadParameter, before anything is measured."""
    if json_file is None or (json_file.exists() and not json_file.is_file()):  # a pipe is opened only once
        return json_file
    is_new = not json_file.exists()
    try:
        json_file.open("ab").close()
        if is_new:
            json_file.unlink()
    except OSError as exc:
        raise typer.BadParameter(f"cannot write {json_file}: {exc.strerror}") from exc
    return json_file


ApiKey = Annotated[str | None, typer.Option(envvar="HANDOFF_API_KEY", help="Bearer token of requests.")]
JsonFile = Annotated[
    Path | None,
    typer.Option("--json", dir_okay=False, callback=_writable, help="Write the result there as JSON too."),
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
    """One line, if a file is wanted. What is printed is the result already; exit status 1 if it cannot be kept."""
    if json_file is None:
        return
    try:
        json_file.write_text(json_line(content) + "\n")
    except OSError as exc:
        typer.echo(f"handoff bench: cannot write {json_file}: {exc.strerror}", err=True)
        raise typer.Exit(1) from exc


def no_result(command: str, exc: Exception) -> typer.Exit:
    """Say why there is none; to be raised."""
    typer.echo(f"handoff bench {command}: {exc}", err=True)
    return typer.Exit(1)

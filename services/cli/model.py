"""`handoff model pull | list | path`: get models before they are served, and see which are here."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from enum import StrEnum
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from shared.models.catalog import cached_models
from shared.models.error import ModelError
from shared.models.locate import AUTO, forget_auto
from shared.models.prepare import ensure_checkpoint, find_checkpoint
from shared.models.store import default_cache_dir

model_app = typer.Typer(
    help="Get, list and find models.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    add_completion=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


class Dtype(StrEnum):
    """Number formats that can be served."""

    FLOAT32 = "float32"
    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"


Model = Annotated[
    str, typer.Argument(envvar="HANDOFF_MODEL", help="Folder, .gguf file, hub id (owner/name), or auto.")
]
InDtype = Annotated[
    Dtype, typer.Option("--dtype", help="Number format that will be served: CPUs float32, GPUs bfloat16.")
]


@model_app.command()
def pull(
    model: Model = AUTO,
    dtype: InDtype = Dtype.FLOAT32,
    fresh: Annotated[
        bool, typer.Option("--fresh", help="Let `auto` choose anew between the hub and the offline model.")
    ] = False,
) -> None:
    """Download and convert MODEL so that a server starts at once; print where it lies."""
    cache_dir = default_cache_dir(os.environ)
    with _clear_errors(), _progress() as report:
        if fresh:
            forget_auto(cache_dir)
        folder = ensure_checkpoint(model, dtype.value, cache_dir, report)
    typer.echo(folder)


@model_app.command("list")
def list_models() -> None:
    """Show what lies in the cache."""
    cache_dir = default_cache_dir(os.environ)
    with _clear_errors():
        models = cached_models(cache_dir)
    if not models:
        typer.echo(f"no models in {cache_dir}", err=True)
        return
    if not sys.stdout.isatty():
        for entry in models:
            typer.echo(f"{entry.name}\t{entry.kind}\t{entry.size_bytes}\t{entry.path}")
        return
    table = Table(box=None)
    for title in ("model", "kind", "size", "path"):
        table.add_column(title, justify="right" if title == "size" else "left", overflow="fold")
    for entry in models:
        table.add_row(entry.name, entry.kind, f"{entry.size_bytes / 1e9:.2f} GB", str(entry.path))
    Console().print(table)


@model_app.command()
def path(model: Model = AUTO, dtype: InDtype = Dtype.FLOAT32) -> None:
    """Print the folder that MODEL is served from; fail if it is not here yet. Uses no network."""
    cache_dir = default_cache_dir(os.environ)
    with _clear_errors():
        folder = find_checkpoint(model, dtype.value, cache_dir)
        if folder is None:
            raise ModelError(f"{model} is not here in {dtype.value}; `handoff model pull` gets it")
    typer.echo(folder)


@contextmanager
def _clear_errors() -> Iterator[None]:
    try:
        yield
    except ModelError as exc:
        typer.echo(f"handoff: {exc}", err=True)
        raise typer.Exit(1) from exc
    except OSError as exc:
        typer.echo(f"handoff: {exc.strerror or exc}", err=True)
        raise typer.Exit(1) from exc


@contextmanager
def _progress() -> Iterator[Callable[[str], None]]:
    """A spinner with the newest line on a terminal; every line, plain, anywhere else. On stderr."""
    console = Console(stderr=True)
    if not console.is_terminal:
        yield lambda line: typer.echo(line, err=True)
        return
    with console.status("looking for the model") as status:
        yield lambda line: status.update(line)

"""`handoff kv inspect | verify | size | save | replay`: hand-offs as files, and what KV weighs.

Needs no torch; only save and replay need a worker. Exit status 1: a file is no sound blob, a model is not known, or
a worker refuses.
"""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from services.cli.kv_blob import BlobCheck, NoBlob, check_blob
from services.cli.kv_sizes import named_architecture, size_table, sizes_as_json
from services.cli.kv_tables import check_as_json, print_check, verify_line
from services.cli.kv_text import console, one_line
from services.cli.kv_workers import replay, save
from shared.kv.shape import ITEMSIZE_BYTES
from shared.kv.size import UnknownArchitecture, known_models

_MAX_TOKENS = 10**12

kv_app = typer.Typer(
    help="Inspect, verify, save and replay hand-offs of KV, and say what KV weighs.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
kv_app.command()(save)
kv_app.command()(replay)


class Dtype(StrEnum):
    """Number formats of KV."""

    BF16 = "bf16"
    F16 = "f16"
    F32 = "f32"

    @property
    def itemsize_bytes(self) -> int:
        """Bytes of one number."""
        return {name.lower(): size for name, size in ITEMSIZE_BYTES.items()}[self.value]


AsJson = Annotated[bool, typer.Option("--json", help="As JSON, every tensor and size in bytes.")]


@kv_app.command()
def inspect(
    file: Annotated[Path, typer.Argument(help="The safetensors stream of one hand-off.")],
    every: Annotated[bool, typer.Option("--all", help="A row per tensor instead of per chunk.")] = False,
    as_json: AsJson = False,
) -> None:
    """Show a blob: manifest, chunks, first tokens, sizes, and whether its digests are right."""
    try:
        check = check_blob(file)
    except NoBlob as exc:
        raise _failed(f"{one_line(file)}: {exc}") from exc
    if as_json:
        typer.echo(json.dumps(check_as_json(file, check), indent=2))
    else:
        print_check(console(), file, check, all_tensors=every)
    raise typer.Exit(0 if check.sound else 1)


@kv_app.command()
def verify(files: Annotated[list[Path], typer.Argument(metavar="FILE...", help="Blobs to check.")]) -> None:
    """Check blobs to the last bit, one line each; exit status 0 only if all are sound."""
    sound = True
    for file in files:
        result = _checked(file)
        sound &= isinstance(result, BlobCheck) and result.sound
        if isinstance(result, BlobCheck):
            typer.echo(verify_line(file, result))
        else:
            typer.echo(f"{one_line(file)}: FAILED: {result}")
    raise typer.Exit(0 if sound else 1)


@kv_app.command()
def size(
    model: Annotated[
        str | None, typer.Option(help="A known name, a config.json or its folder. Without: all known models.")
    ] = None,
    tokens: Annotated[
        list[int] | None,
        typer.Option(min=1, max=_MAX_TOKENS, help="Number of tokens; may be repeated. [default: 128, 1024]"),
    ] = None,
    dtype: Annotated[Dtype, typer.Option(help="Number format.")] = Dtype.BF16,
    itemsize: Annotated[
        int | None,
        typer.Option(min=1, max=8, help="Bytes of one number instead of --dtype; 1 for fp8, int8."),
    ] = None,
    as_json: AsJson = False,
) -> None:
    """Print the bytes of KV by architecture: MHA, GQA, MQA, or MLA's latent and rope."""
    if model is None:
        models = [(known.name, known.kv) for known in known_models()]
    else:
        try:
            models = [named_architecture(model)]
        except UnknownArchitecture as exc:
            raise _failed(str(exc)) from exc
    wanted = list(dict.fromkeys(tokens or (128, 1024)))
    itemsize_bytes = itemsize or dtype.itemsize_bytes
    if as_json:
        typer.echo(json.dumps(sizes_as_json(models, wanted, itemsize_bytes), indent=2))
    else:
        console().print(size_table(models, wanted, itemsize_bytes))


def _checked(file: Path) -> BlobCheck | str:
    try:
        return check_blob(file)
    except NoBlob as exc:
        return str(exc)


def _failed(line: str) -> typer.Exit:
    typer.echo(f"handoff: {line}", err=True)
    return typer.Exit(1)

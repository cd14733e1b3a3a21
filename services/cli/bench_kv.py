"""The command `handoff bench kv-quant`; `bench_kv_quant` measures. It loads the model in this process."""

from __future__ import annotations

import os
from typing import Annotated

import typer
from rich.console import Console

from loadtest.report import print_json_line
from services.cli.bench_options import JsonFile, no_result, write_json
from services.cli.bench_stack import busy
from services.cli.model import Dtype
from shared.models.error import ModelError
from shared.models.prepare import ensure_checkpoint, model_name
from shared.models.store import default_cache_dir


def kv_quant(
    model: Annotated[
        str, typer.Option(envvar="HANDOFF_MODEL", help="Folder, hub id, .gguf file, or auto.")
    ] = "auto",
    dtype: Annotated[Dtype, typer.Option(help="Number format of weights and KV.")] = Dtype.FLOAT32,
    prompt_tokens: Annotated[int, typer.Option(min=1, help="Most tokens of each prompt.")] = 256,
    output_tokens: Annotated[int, typer.Option(min=1, max=1024, help="Length of each answer.")] = 32,
    threads: Annotated[int | None, typer.Option(min=1, help="Compute threads; all cores by default.")] = None,
    json_file: JsonFile = None,
) -> None:
    """Bytes, time and accuracy of int8 and fp8 KV on a real model: what HANDOFF_KV_WIRE would do."""
    import torch  # noqa: PLC0415 - takes seconds, and the other commands need none of it

    from services.cli.bench_kv_quant import DTYPES, measure_kv_quant, print_kv_quant  # noqa: PLC0415 - the same

    cores = sorted(os.sched_getaffinity(0))
    load_average, warning = busy(cores)
    if warning is not None:
        typer.echo(f"handoff bench kv-quant: {warning}", err=True)
    torch.set_num_threads(threads or len(cores))
    try:
        folder = ensure_checkpoint(model, dtype.value, default_cache_dir(os.environ), _say)
        result = measure_kv_quant(
            folder, DTYPES[dtype.value], prompt_tokens=prompt_tokens, num_tokens=output_tokens, report=_say
        )
    except (ModelError, ValueError, OSError) as exc:
        raise no_result("kv-quant", exc) from exc
    console = Console()
    facts = {"bench": "kv-quant", "model": model_name(folder), "dtype": dtype.value, "cores": len(cores)}
    content = {**facts, "load_average_before": load_average, "formats": result.to_dict()}
    print_kv_quant(console, result)
    print_json_line(console, content)
    write_json(json_file, content)


def _say(line: str) -> None:
    typer.echo(line, err=True)

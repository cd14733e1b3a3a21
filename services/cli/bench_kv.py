"""The commands `handoff bench kv-quant`, which loads the model in this process, and `overlap`.

`bench_kv_quant` and `bench_overlap` measure.
"""

from __future__ import annotations

import os
from typing import Annotated

import httpx
import typer
from rich.console import Console

from loadtest.report import print_json_line
from services.cli.bench_options import MAX_NUMBER, JsonFile, Seed, look_at_cores, no_result, write_json
from services.cli.bench_overlap import Plan as OverlapPlan
from services.cli.bench_overlap import measure_overlap, print_overlap
from services.cli.bench_stack import StackFailed, sigterm_as_interrupt
from services.cli.model import Dtype
from shared.models.error import ModelError
from shared.models.prepare import ensure_checkpoint, model_name
from shared.models.store import default_cache_dir


def kv_quant(
    model: Annotated[
        str, typer.Option(envvar="HANDOFF_MODEL", help="Folder, hub id, .gguf file, or auto.")
    ] = "auto",
    dtype: Annotated[Dtype, typer.Option(help="Number format of weights and KV.")] = Dtype.FLOAT32,
    prompt_tokens: Annotated[
        int, typer.Option(min=1, max=MAX_NUMBER, help="Most tokens of each prompt.")
    ] = 256,
    output_tokens: Annotated[int, typer.Option(min=1, max=1024, help="Length of each answer.")] = 32,
    threads: Annotated[
        int | None, typer.Option(min=1, max=1024, help="Compute threads; all cores by default.")
    ] = None,
    json_file: JsonFile = None,
) -> None:
    """Bytes, time and accuracy of int8 and fp8 KV on a real model: what HANDOFF_KV_WIRE would do."""
    import torch  # noqa: PLC0415 - takes seconds, and the other commands need none of it

    from services.cli.bench_kv_quant import measure_kv_quant, print_kv_quant  # noqa: PLC0415 - the same

    cores, load_average = look_at_cores("kv-quant")
    torch.set_num_threads(threads or len(cores))
    try:
        folder = ensure_checkpoint(model, dtype.value, default_cache_dir(os.environ), _say)
        result = measure_kv_quant(
            folder, dtype.value, prompt_tokens=prompt_tokens, num_tokens=output_tokens, report=_say
        )
    except (ModelError, ValueError, OSError) as exc:
        raise no_result("kv-quant", exc) from exc
    console = Console()
    facts = {"bench": "kv-quant", "model": model_name(folder), "dtype": dtype.value, "cores": len(cores)}
    content = {**facts, "load_average_before": load_average, "formats": result.to_dict()}
    print_kv_quant(console, result)
    print_json_line(console, content)
    write_json(json_file, content)


def overlap(
    model: Annotated[
        str, typer.Option(envvar="HANDOFF_MODEL", help="Folder, hub id, .gguf file, or auto.")
    ] = "auto",
    prompt_tokens: Annotated[
        int, typer.Option(min=1, max=MAX_NUMBER, help="Prompt length in tokens.")
    ] = 1024,
    chunk_size: Annotated[int, typer.Option(min=1, max=MAX_NUMBER, help="Tokens of a chunk.")] = 256,
    runs: Annotated[int, typer.Option(min=1, max=MAX_NUMBER, help="Measured hand-offs of each way.")] = 5,
    threads_per_worker: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Compute threads of every worker; half the cores by default."),
    ] = None,
    dtype: Annotated[Dtype | None, typer.Option(help="Number format of weights and KV.")] = None,
    transports: Annotated[
        str | None, typer.Option(help="KV transports in order of preference; the worker's own by default.")
    ] = None,
    start_timeout_s: Annotated[
        float, typer.Option("--start-timeout", min=1, max=86_400, help="Seconds until a worker is ready.")
    ] = 1800.0,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """What of the transfer is exposed: without overlap, by chunks, and by layers within the last chunk."""
    cores, load_average = look_at_cores("overlap")
    plan = OverlapPlan(
        model=model,
        prompt_tokens=prompt_tokens,
        chunk_size=chunk_size,
        runs=runs,
        threads=threads_per_worker,
        dtype=dtype.value if dtype is not None else None,
        transports=transports,
        start_timeout_s=start_timeout_s,
        seed=seed,
    )
    try:
        with sigterm_as_interrupt():
            result = measure_overlap(plan, cores, os.environ)
    except (StackFailed, httpx.HTTPError, OSError) as exc:
        raise no_result("overlap", exc) from exc
    console = Console()
    host = {"cores": len(cores), "load_average_before": load_average}
    content = {"bench": "overlap", **host, **result.to_dict()}
    print_overlap(console, result)
    print_json_line(console, content)
    write_json(json_file, content)


def _say(line: str) -> None:
    typer.echo(line, err=True)

"""`handoff bench`: `stages` compares prefill/decode split with unified on this host, `router` measures the router
alone, `transfer` the KV transports, `overlap` what of a transfer prefill hides, `kv-quant` quantised KV,
`structured` what a server's constraints are worth, `load` any server.

A benchmark is no test: a missed goal is printed and the exit status stays 0; 1 means that there is no result.
"""

from __future__ import annotations

import asyncio
import os
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Annotated

import httpx
import typer
from rich.console import Console

from loadtest.client import LoadClient
from loadtest.metrics import SLO, RequestRecord, summarise
from loadtest.report import print_json_line, print_report
from loadtest.traces import Scale
from services.cli.bench_kv import kv_quant, overlap
from services.cli.bench_load import (
    ClosedLoop,
    OpenLoop,
    Shape,
    closed,
    poisson_arrivals,
    trace_replay,
)
from services.cli.bench_options import (
    MAX_NUMBER,
    ApiKey,
    JsonFile,
    Seed,
    look_at_cores,
    no_result,
    write_json,
)
from services.cli.bench_router import Plan as RouterPlan
from services.cli.bench_router import measure_router, print_router
from services.cli.bench_stack import (
    TOPOLOGIES,
    Compute,
    StackFailed,
    Topology,
    free_port,
    running,
    sigterm_as_interrupt,
    up_command,
    up_environ,
)
from services.cli.bench_stages import BenchFailed, Plan, measure
from services.cli.bench_structured import Server, measure_structured, print_structured
from services.cli.bench_tables import print_result
from services.cli.bench_transfer import (
    SIZES_MIB,
    measure_transfer,
    parse_sizes,
    parse_transports,
    print_transfer,
)
from services.cli.bench_transfer import Plan as TransferPlan
from services.cli.options import checked_url
from shared.errors import ServingError
from shared.models.error import ModelError
from shared.models.prepare import ensure_tokenizer
from shared.models.store import default_cache_dir

bench_app = typer.Typer(
    help="Measure: where a request's time goes, and what a server bears.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

bench_app.command("kv-quant")(kv_quant)
bench_app.command()(overlap)


@bench_app.command()
def stages(
    model: Annotated[
        str | None, typer.Option(envvar="HANDOFF_MODEL", help="Folder, hub id, .gguf file, or auto.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, max=MAX_NUMBER, help="Prompt length in tokens.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, max=MAX_NUMBER, help="Output length in tokens.")] = 32,
    runs: Annotated[int, typer.Option(min=1, max=MAX_NUMBER, help="Measured requests to each topology.")] = 5,
    warmup: Annotated[
        int, typer.Option(min=0, max=MAX_NUMBER, help="Requests before them that do not count.")
    ] = 1,
    threads_per_worker: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Compute threads of every worker; half the cores by default."),
    ] = None,
    start_timeout_s: Annotated[
        float, typer.Option("--start-timeout", min=1, max=86_400, help="Seconds until a stack is ready.")
    ] = 1800.0,
    pd_url: Annotated[
        str | None,
        typer.Option(callback=checked_url, help="A running, idle PD stack to use instead of starting one."),
    ] = None,
    unified_url: Annotated[
        str | None, typer.Option(callback=checked_url, help="The same for unified.")
    ] = None,
    api_key: ApiKey = None,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Stage split of single requests over PD and unified on this host, taken in turns: A, B, A, B."""
    plan = Plan(prompt_tokens, output_tokens, runs, warmup, seed)
    cores, load_average = look_at_cores("stages")
    compute = Compute.fair(cores, threads_per_worker)
    given = {"pd": pd_url, "unified": unified_url}
    urls: dict[Topology, str] = {}
    try:
        with ExitStack() as stacks:
            stacks.enter_context(sigterm_as_interrupt())
            for topology in TOPOLOGIES:
                url = given[topology]
                urls[topology] = url or stacks.enter_context(
                    _started(topology, compute, model=model, timeout_s=start_timeout_s)
                )
            result = asyncio.run(measure(urls, plan, api_key=api_key))
    except (StackFailed, BenchFailed, httpx.HTTPError, httpx.InvalidURL, ValueError) as exc:
        raise no_result("stages", exc) from exc
    console = Console()
    threads = None if all(given.values()) else compute.threads_per_worker
    host = {"cores": len(cores), "load_average_before": load_average, "threads_per_worker": threads}
    content = {"bench": "stages", **host, **result.to_dict()}
    print_result(console, result)
    print_json_line(console, content)
    write_json(json_file, content)


@contextmanager
def _started(topology: Topology, compute: Compute, *, model: str | None, timeout_s: float) -> Iterator[str]:
    port = free_port()
    command = up_command(topology, port=port, compute=compute, model=model)
    environ = up_environ(topology, compute, os.environ)
    with running(command, f"http://127.0.0.1:{port}", environ=environ, timeout_s=timeout_s) as base_url:
        yield base_url


@bench_app.command()
def load(
    url: Annotated[
        str, typer.Option(callback=checked_url, help="Base URL of the server.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model name; the server's first one by default.")] = None,
    api_key: ApiKey = None,
    concurrency: Annotated[
        int | None,
        typer.Option(
            min=1, max=MAX_NUMBER, help="Closed loop: so many users, no pauses (the default, with 1)."
        ),
    ] = None,
    rate: Annotated[
        float | None, typer.Option(min=1e-6, max=1e6, help="Open loop: Poisson arrivals, requests/s.")
    ] = None,
    trace: Annotated[
        str | None, typer.Option(help="Open loop: replay azure-conv, azure-code, mooncake, or a trace file.")
    ] = None,
    requests: Annotated[
        int | None, typer.Option(min=1, max=MAX_NUMBER, help="How many; 32, or the whole trace, by default.")
    ] = None,
    prompt_tokens: Annotated[int, typer.Option(min=1, max=MAX_NUMBER, help="Prompt length in tokens.")] = 128,
    output_tokens: Annotated[int, typer.Option(min=1, max=MAX_NUMBER, help="Output length in tokens.")] = 32,
    chat: Annotated[
        bool, typer.Option("--chat", help="Chat with word prompts; their length is not exact.")
    ] = False,
    time_scale: Annotated[float, typer.Option(help="Multiplies the arrival times of a trace.")] = 1.0,
    length_scale: Annotated[float, typer.Option(help="Multiplies the lengths of a trace.")] = 1.0,
    slo_ttft_ms: Annotated[float | None, typer.Option(min=0, max=1e9, help="TTFT limit for goodput.")] = None,
    slo_tpot_ms: Annotated[float | None, typer.Option(min=0, max=1e9, help="TPOT limit for goodput.")] = None,
    slo_e2el_ms: Annotated[float | None, typer.Option(min=0, max=1e9, help="E2EL limit for goodput.")] = None,
    timeout_s: Annotated[
        float, typer.Option("--timeout", min=0.1, max=86_400, help="Longest silence, in seconds.")
    ] = 600.0,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Send many streamed requests to a running server; report latencies, throughput, goodput and stages."""
    if sum(way is not None for way in (concurrency, rate, trace)) > 1:
        raise typer.BadParameter("give one of --concurrency, --rate and --trace")
    shape = Shape(requests, prompt_tokens, output_tokens, chat, seed)
    workload: ClosedLoop | OpenLoop
    try:
        if trace is not None:
            scale = Scale(time_scale, length_scale)
            workload = trace_replay(trace, scale, num_requests=requests, seed=seed)
        elif rate is not None:
            workload = poisson_arrivals(shape, rate)
        else:
            workload = closed(shape, concurrency or 1)

        async def send_all() -> list[RequestRecord]:
            async with LoadClient(url, model=model, api_key=api_key, timeout_s=timeout_s) as client:
                return await workload.run(client)

        records = asyncio.run(send_all())
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as exc:
        raise no_result("load", exc) from exc
    facts = {"bench": "load", "url": url, **workload.facts}
    summary = summarise(records, SLO(_s(slo_ttft_ms), _s(slo_tpot_ms), _s(slo_e2el_ms)))
    print_report(Console(), summary, facts)
    write_json(json_file, {**facts, **summary.to_dict()})


@bench_app.command()
def router(
    model: Annotated[
        str,
        typer.Option(envvar="HANDOFF_MODEL", help="Whose tokenizer: folder, hub id, .gguf file, or auto."),
    ] = "auto",
    runs: Annotated[
        int, typer.Option(min=10, max=MAX_NUMBER, help="Measured first tokens of each way.")
    ] = 200,
    streams: Annotated[
        int, typer.Option(min=1, max=MAX_NUMBER, help="Streams at a time, for the throughput.")
    ] = 32,
    tokens: Annotated[int, typer.Option(min=1, max=MAX_NUMBER, help="Tokens of each of them.")] = 200,
    json_file: JsonFile = None,
) -> None:
    """What one router process adds to the first token and how many tokens it streams; no model is needed."""
    cores, load_average = look_at_cores("router")
    try:
        folder = ensure_tokenizer(
            model, default_cache_dir(os.environ), lambda line: typer.echo(line, err=True)
        )
        plan = RouterPlan(runs, streams, tokens)
        with sigterm_as_interrupt():
            result = measure_router(plan, folder, cores, os.environ)
    except (httpx.HTTPError, StackFailed, ModelError, OSError) as exc:
        raise no_result("router", exc) from exc
    console = Console()
    host = {"cores": len(cores), "load_average_before": load_average}
    print_router(console, result)
    content = {"bench": "router", **host, **result.to_dict()}
    print_json_line(console, content)
    write_json(json_file, content)


@bench_app.command()
def structured(
    url: Annotated[
        str, typer.Option(callback=checked_url, help="Base URL of the server.")
    ] = "http://127.0.0.1:8000",
    model: Annotated[str | None, typer.Option(help="Model name; the served one by default.")] = None,
    api_key: ApiKey = None,
    runs: Annotated[
        int, typer.Option(min=0, max=MAX_NUMBER, help="Answers under a schema, all kinds in turn.")
    ] = 200,
    calls: Annotated[int, typer.Option(min=0, max=MAX_NUMBER, help="Answers that must call a tool.")] = 50,
    max_tokens: Annotated[int, typer.Option(min=1, max=MAX_NUMBER, help="Longest answer in tokens.")] = 300,
    concurrency: Annotated[int, typer.Option(min=1, max=MAX_NUMBER, help="Requests at a time.")] = 4,
    seed: Seed = 0,
    json_file: JsonFile = None,
) -> None:
    """Answers under schemas and required tool calls at temperature 1: how many are what was asked for."""
    server = Server(url.rstrip("/"), model, api_key, max_tokens)
    try:
        tally = measure_structured(server, runs=runs, calls=calls, concurrency=concurrency, seed=seed)
    except (httpx.HTTPError, httpx.InvalidURL, ValueError) as exc:
        raise no_result("structured", exc) from exc
    console = Console()
    content = {"bench": "structured", "url": url, "max_tokens": max_tokens, **tally.to_dict()}
    print_structured(console, tally)
    print_json_line(console, content)
    write_json(json_file, content)


@bench_app.command()
def transfer(
    sizes: Annotated[str, typer.Option(help="Sizes of KV in MiB.")] = ",".join(
        f"{mib:g}" for mib in SIZES_MIB
    ),
    transports: Annotated[
        str, typer.Option(help="KV transports to measure, as far as they work here; nixl is an extra.")
    ] = "shm,unix,tcp,nixl",
    runs: Annotated[
        int, typer.Option(min=3, max=MAX_NUMBER, help="Measured runs of each way and size.")
    ] = 30,
    scattered: Annotated[
        bool, typer.Option("--scattered", help="Blocks of a sequence are no neighbours, as in an old pool.")
    ] = False,
    json_file: JsonFile = None,
) -> None:
    """KV from process to process over every transport, beside memcpy, raw TCP and pickle; no model is needed."""
    try:
        plan, names = TransferPlan(parse_sizes(sizes), runs), parse_transports(transports)
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from exc
    cores, load_average = look_at_cores("transfer")
    try:
        result = measure_transfer(plan, cores, names, scattered=scattered)
    except EOFError as exc:
        raise no_result("transfer", RuntimeError("the receiving process ended")) from exc
    except (ValueError, OSError, MemoryError, ServingError) as exc:
        raise no_result("transfer", exc) from exc
    console = Console()
    host = {"cores": len(cores), "load_average_before": load_average, "scattered": scattered}
    content = {"bench": "transfer", **host, **result.to_dict()}
    print_transfer(console, result)
    print_json_line(console, content)
    write_json(json_file, content)


def _s(limit_ms: float | None) -> float | None:
    return None if limit_ms is None else limit_ms / 1000

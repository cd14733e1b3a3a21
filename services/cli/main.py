"""The command `handoff`: arguments in, exit status out. What a subcommand needs is imported when it is called.

Importing it all here would make `handoff --help` load a web server and torch.
"""

from __future__ import annotations

import os
import sys
from typing import TYPE_CHECKING, Annotated

import typer

from services.cli.options import SecretFile, checked_url

if TYPE_CHECKING:
    from services.cli.run import Process

# How long a process whose supervisor was killed may go on with what it is doing.
_ORPHAN_GRACE_S = 5.0
# What `handoff model` and `handoff bench` are given is for their own parsers, `--help` included.
_PASS_ON = {"allow_extra_args": True, "ignore_unknown_options": True, "help_option_names": []}

app = typer.Typer(
    name="handoff",
    help="LLM serving with prefill and decode as two services that hand the KV cache over.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)

StopWithStdin = Annotated[bool, typer.Option("--stop-with-stdin", hidden=True)]


def main() -> None:
    """Entry point of the installed command."""
    app()


def _version(wanted: bool) -> None:
    if wanted:
        from importlib import metadata

        typer.echo(f"handoff {metadata.version('handoff')}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and leave.")
    ] = False,
) -> None:
    pass


@app.command()
def up(
    model: Annotated[
        str, typer.Option(envvar="HANDOFF_MODEL", help="Folder, hub id, .gguf file, or auto.")
    ] = "auto",
    host: Annotated[
        str, typer.Option(envvar="HANDOFF_HOST", help="Address the router listens on.")
    ] = "127.0.0.1",
    port: Annotated[
        int, typer.Option(envvar="HANDOFF_PORT", min=1, max=65535, help="Port the router listens on.")
    ] = 8000,
    prefill: Annotated[int, typer.Option(min=0, max=64, help="Number of prefill workers.")] = 1,
    decode: Annotated[int, typer.Option(min=1, max=64, help="Number of decode workers.")] = 1,
    unified: Annotated[
        bool, typer.Option("--unified", help="No prefill worker: decode workers prefill themselves.")
    ] = False,
    threads_per_worker: Annotated[
        int | None,
        typer.Option(min=1, max=1024, help="Compute threads of each worker instead of one per core."),
    ] = None,
    api_key: Annotated[
        str | None,
        typer.Option(
            envvar="HANDOFF_API_KEY",
            show_default=False,
            help="Key that clients must send. The variable, unlike the option, is not in the list of processes.",
        ),
    ] = None,
    logs: Annotated[bool, typer.Option("--logs", help="Show the log lines of all processes.")] = False,
) -> None:
    """Start router, prefill and decode workers on this host and keep them running until Ctrl-C."""
    from services.cli.plan import Options
    from services.cli.up import run_up

    options = Options(
        model=model,
        host=host,
        port=port,
        num_prefill=0 if unified else prefill,
        num_decode=decode,
        threads_per_worker=threads_per_worker,
    )
    own = {"HANDOFF_API_KEY": api_key} if api_key else {}
    raise typer.Exit(run_up(options, {**os.environ, **own}, show_logs=logs))


@app.command()
def router(stop_with_stdin: StopWithStdin = False) -> None:
    """Run a router, set up by HANDOFF_ variables."""
    _run("router", stop_with_stdin)


@app.command()
def prefill(stop_with_stdin: StopWithStdin = False) -> None:
    """Run a prefill worker, set up by HANDOFF_ variables."""
    _run("prefill", stop_with_stdin)


@app.command()
def decode(stop_with_stdin: StopWithStdin = False) -> None:
    """Run a decode worker, set up by HANDOFF_ variables."""
    _run("decode", stop_with_stdin)


@app.command(context_settings=_PASS_ON)
def model(context: typer.Context) -> None:
    """Get, list and find models (pull, list, path)."""
    from services.cli.model import model_app

    model_app(args=context.args, prog_name="handoff model")


@app.command(context_settings=_PASS_ON)
def bench(context: typer.Context) -> None:
    """Measure a running server."""
    from services.cli.bench import bench_app

    bench_app(args=context.args, prog_name="handoff bench")


@app.command(context_settings=_PASS_ON)
def kv(context: typer.Context) -> None:
    """Look into hand-offs of KV, and say what KV weighs (inspect, verify, size, save, replay)."""
    from services.cli.kv import kv_app

    kv_app(args=context.args, prog_name="handoff kv")


@app.command()
def doctor(
    prefill_url: Annotated[
        str, typer.Option("--prefill", callback=checked_url, help="The prefill worker, http://host:port.")
    ],
    decode_url: Annotated[
        str, typer.Option("--decode", callback=checked_url, help="The decode worker, http://host:port.")
    ],
    prompt: Annotated[
        list[int] | None,
        typer.Option(min=1, max=1_000_000, help="Prompt tokens; repeat it for a mix. [default: 128, 1024]"),
    ] = None,
    output: Annotated[int, typer.Option(min=2, max=1_000_000, help="Tokens of an answer.")] = 128,
    running: Annotated[int, typer.Option(min=1, max=64, help="Answers decoded at a time.")] = 8,
    runs: Annotated[int, typer.Option(min=2, max=64, help="Transfers of each size and transport.")] = 7,
    compute_s: Annotated[
        float, typer.Option("--seconds", min=1, max=600, help="Seconds that timing prompts may take.")
    ] = 60.0,
    secret_file: SecretFile = None,
    as_json: Annotated[bool, typer.Option("--json", help="Only the JSON line.")] = False,
) -> None:
    """Examine two running workers: is all well, how fast is what, and does splitting pay?

    Exit status 0: healthy, 1: a problem, 2: usage. The workers should be idle; what they serve is not harmed.
    """
    from services.cli.doctor import Plan
    from services.cli.doctor_command import run_doctor
    from services.cli.doctor_model import Load
    from services.cli.workers import secret_of

    plan = Plan(
        prefill_url=prefill_url.rstrip("/"),
        decode_url=decode_url.rstrip("/"),
        secret=secret_of(secret_file),
        prompts=tuple(sorted(set(prompt or (128, 1024)))),
        load=Load(output_tokens=output, running=running),
        runs=runs,
        compute_s=compute_s,
    )
    raise typer.Exit(run_doctor(plan, as_json=as_json))


@app.command()
def settings(
    markdown: Annotated[bool, typer.Option("--markdown", help="As a Markdown table.")] = False,
) -> None:
    """List every HANDOFF_ setting with default, limits and meaning."""
    from services.cli import settings_table
    from services.cli.run import settings_classes

    table = settings_table.rows(settings_classes())
    typer.echo(settings_table.markdown(table) if markdown else settings_table.plain(table))


@app.command()
def health(
    url: Annotated[str, typer.Argument(help="For example http://127.0.0.1:8000/ready")],
    timeout_s: Annotated[float, typer.Option("--timeout", min=0.1, max=60, help="Seconds to wait.")] = 3.0,
) -> None:
    """Ask one URL; exit status 0 if it answers with 2xx."""
    from services.cli.health import check

    problem = check(url, timeout_s)
    if problem is not None:
        typer.echo(problem, err=True)
        raise typer.Exit(1)


def _run(process: Process, stop_with_stdin: bool) -> None:
    from services.cli.lifeline import stop_at_eof
    from services.cli.run import run_process

    if stop_with_stdin:
        stop_at_eof(sys.stdin.fileno(), grace_s=_ORPHAN_GRACE_S)
    raise typer.Exit(run_process(process, os.environ))


if __name__ == "__main__":
    main()

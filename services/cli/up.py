"""`handoff up`: a whole deployment on this host, from the model to a curl line, in one command.

Order: settings, port, model, processes; so what can fail early fails before anything is started.
Exit status: 0 after Ctrl-C or SIGTERM, 1 if something failed, 2 for settings that are none.
"""

from __future__ import annotations

import asyncio
import json
import shlex
import shutil
import signal
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path

import httpx
from rich.console import Console
from rich.text import Text

from services.cli.health import answers
from services.cli.host import look_at_host, why_not_listen
from services.cli.interrupt import unwound_by_signals
from services.cli.lasting import lasting
from services.cli.log_lines import readable
from services.cli.plan import ChildSpec, Host, Options, base_url, plan, with_checkpoint
from services.cli.progress import Display, make_display
from services.cli.run import settings_classes
from services.cli.supervisor import ChildFailed, Policy, Stop, Supervisor
from services.cli.up_settings import check_settings, secret_of
from shared.models.ending import SIGNALS
from shared.models.error import ModelError
from shared.models.prepare import ensure_checkpoint
from shared.models.store import default_cache_dir
from shared.settings import BAD_SETTINGS, BadSettings, without_empty

FAILED = 1

_QUESTION = "What is the capital of France?"
_STOP_MARGIN_S = 10.0
_DOWNLOAD_GRACE_S = 3.0
_ASK_AGAIN_S = (0.5, 1.0, 2.0)


def run_up(options: Options, environ: Mapping[str, str], *, show_logs: bool) -> int:
    """Start everything, keep it running until Ctrl-C or SIGTERM; returns the exit status."""
    console = Console(highlight=False, file=lasting(sys.stdout))
    environ = without_empty(environ)
    try:
        host = look_at_host(environ, num_ports=len(options.workers))
        specs = plan(options, host, environ, secret=secret_of(environ))
        keys = check_settings(specs, environ, host)
    except BadSettings as exc:
        complain(str(exc))
        return BAD_SETTINGS
    if reason := why_not_listen(options.host, options.port):
        complain(f"cannot listen on {options.host} port {options.port}: {reason}; choose another --port")
        return FAILED
    try:
        with (
            unwound_by_signals(_DOWNLOAD_GRACE_S, at_last=lambda: console.show_cursor(True)),
            make_display(console) as display,
        ):
            checkpoint = get_model(options.model, host, environ, display)
            weights_bytes = sum(file.stat().st_size for file in checkpoint.glob("*.safetensors"))
            specs = with_checkpoint(specs, checkpoint, weights_bytes, host)
            asyncio.run(serve(options, specs, display, key=next(iter(keys), None), show_logs=show_logs))
    except KeyboardInterrupt:
        return 0
    except ModelError as exc:
        complain(str(exc))
        return FAILED
    except ChildFailed as exc:
        complain("\n  ".join([f"{exc}. Its last lines:", *exc.lines]))
        return FAILED
    return 0


def complain(reason: str) -> None:
    """Say on stderr why it ends."""
    Console(stderr=True).print(Text(f"handoff up: {reason}", "red"), soft_wrap=True)


def get_model(model: str, host: Host, environ: Mapping[str, str], display: Display) -> Path:
    """The checkpoint folder all processes will use, fetched and converted now if need be. Raises ModelError."""
    on_gpu = bool(host.gpus) and environ.get("HANDOFF_DEVICE", "auto") != "cpu"
    wanted = environ.get("HANDOFF_DTYPE", "auto")
    dtype_name = wanted if wanted != "auto" else "bfloat16" if on_gpu else "float32"
    display.update("model", "preparing", model)
    folder = ensure_checkpoint(
        model, dtype_name, default_cache_dir(environ), lambda line: display.update("model", "preparing", line)
    )
    display.update("model", "ready", str(folder))
    return folder


def curl_line(url: str, model: str, *, with_key: bool) -> str:
    """A command to paste into a shell: one greedy chat completion, response headers shown.

    with_key: a line before it says to set the key in that shell, which may not have it; none is ever shown.
    """
    body = {"model": model, "messages": [{"role": "user", "content": _QUESTION}], "temperature": 0}
    words = ["curl", "-i", f"{url}/v1/chat/completions", "-H", "Content-Type: application/json"]
    key = ' -H "Authorization: Bearer $HANDOFF_API_KEY"' if with_key else ""
    first = "export HANDOFF_API_KEY=YOUR_KEY\n" if with_key else ""
    return f"{first}{shlex.join(words)}{key} -d {shlex.quote(json.dumps(body))}"


def worker_urls(environ: Mapping[str, str]) -> str:
    """Where the workers of a router with this environment are, for `handoff kv save | replay` and `doctor`."""
    roles = (("prefill", "HANDOFF_PREFILL_URLS"), ("decode", "HANDOFF_DECODE_URLS"))
    return ", ".join(
        f"{role} {url}" for role, name in roles for url in environ.get(name, "").split(",") if url
    )


async def serve(
    options: Options,
    specs: Sequence[ChildSpec],
    display: Display,
    *,
    key: str | None = None,
    show_logs: bool,
) -> None:
    """Run the children until a signal. Their output is kept only if something failed. Raises ChildFailed.

    key: one that opens the API, if it is not open to all.
    """
    stop = Stop()
    loop = asyncio.get_running_loop()
    for number in SIGNALS:
        if signal.getsignal(number) is not signal.SIG_IGN:  # as with nohup
            loop.add_signal_handler(number, stop.ask)
    logs = Path(tempfile.mkdtemp(prefix="handoff-"))
    display.say(f"logs: {logs}")
    async with httpx.AsyncClient(trust_env=False, timeout=2.0) as client:
        supervisor = Supervisor(
            specs,
            logs,
            display=display,
            is_ready=lambda url: answers(client, url),
            policy=Policy(stop_s=_drain_s(specs) + _STOP_MARGIN_S),
            echo=(lambda name, line: display.say(f"{name} | {readable(line)}")) if show_logs else None,
        )
        await supervisor.run(
            stop, lambda: _announce(client, options, worker_urls(specs[-1].environ), key, display)
        )
    shutil.rmtree(logs, ignore_errors=True)


async def _announce(
    client: httpx.AsyncClient, options: Options, workers: str, key: str | None, display: Display
) -> None:
    """Say where the server is and how to ask it something."""
    url = base_url(options.host, options.port)
    model = await _model_of(client, url, key)
    display.settle()
    if model is None:
        display.say(f"\nserving at {url}/v1 - Ctrl-C stops it; it did not say what\n")
    else:
        display.say(
            f"\nserving {model} at {url}/v1 - Ctrl-C stops it\n\n{curl_line(url, model, with_key=bool(key))}\n"
        )
    display.say(f"workers: {workers}\n")


async def _model_of(client: httpx.AsyncClient, url: str, key: str | None) -> str | None:
    """What is served; None if the router, which may just restart, does not say it in a few tries."""
    headers = {"Authorization": f"Bearer {key}"} if key else {}
    for pause_s in (*_ASK_AGAIN_S, None):
        try:
            response = await client.get(f"{url}/v1/models", headers=headers)
            response.raise_for_status()
            return str(response.json()["data"][0]["id"])
        except (httpx.HTTPError, ValueError, LookupError, TypeError):
            if pause_s is not None:
                await asyncio.sleep(pause_s)
    return None


def _drain_s(specs: Sequence[ChildSpec]) -> float:
    """The longest that a process takes to finish its requests after SIGTERM."""
    default = settings_classes()["router"].model_fields["drain_timeout_s"].default
    return max(float(spec.environ.get("HANDOFF_DRAIN_TIMEOUT_S", default)) for spec in specs)

"""`handoff up`: what fails before anything starts, what it prints, and how it ends."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from pathlib import Path

import httpx
import pytest

from services.cli.host import free_ports
from services.cli.plan import Options
from services.cli.up import _announce, curl_line, run_up, worker_urls
from tests.unit.services.cli.fakes import Recorder, events, survivors


def test_a_used_port_is_one_line_and_nothing_starts(
    capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """The model is not even looked at."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
        status = run_up(Options(port=port), {"HANDOFF_CACHE_DIR": str(tmp_path / "cache")}, show_logs=False)
    (line,) = capfd.readouterr().err.splitlines()
    assert 1 == status
    assert line.startswith(f"handoff up: cannot listen on 127.0.0.1 port {port}: Address already in use")
    assert not (tmp_path / "cache").exists()


def test_a_bad_value_is_one_line_and_status_2(capfd: pytest.CaptureFixture[str]) -> None:
    """Every process's settings are checked before the first of them starts."""
    status = run_up(Options(), {"HANDOFF_MAX_TRIES": "none"}, show_logs=False)
    (line,) = capfd.readouterr().err.splitlines()
    assert 2 == status
    assert line.startswith("handoff up: HANDOFF_MAX_TRIES: ")


@pytest.mark.parametrize("key", ["short", "with space 0123456789"])
def test_a_key_that_is_none_is_one_line_and_status_2(capfd: pytest.CaptureFixture[str], key: str) -> None:
    """It is not shown, and nothing starts."""
    status = run_up(Options(), {"HANDOFF_API_KEY": key}, show_logs=False)
    (line,) = capfd.readouterr().err.splitlines()
    assert 2 == status
    assert line.startswith("handoff up: HANDOFF_API_KEY: ")
    assert key not in line


def test_empty_variables_are_as_good_as_none(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """As a compose file gives them; what stops it is the model, which comes after all settings."""
    names = (
        "API_KEY",
        "SECRET",
        "DTYPE",
        "DEVICE",
        "CPUS",
        "DRAIN_TIMEOUT_S",
        "RECOVERY_WAIT_S",
        "KV_POOL_BYTES",
    )
    environ = {f"HANDOFF_{name}": "" for name in names} | {"HANDOFF_CACHE_DIR": str(tmp_path / "cache")}
    status = run_up(Options(model=str(tmp_path), port=free_ports(1)[0]), environ, show_logs=False)
    assert 1 == status
    assert "is no checkpoint folder" in capfd.readouterr().err


def test_a_model_that_is_none_is_one_line(capfd: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    """An empty folder is no checkpoint; nothing is started."""
    options = Options(model=str(tmp_path), port=free_ports(1)[0])
    status = run_up(options, {"HANDOFF_CACHE_DIR": str(tmp_path / "cache")}, show_logs=False)
    errors = capfd.readouterr().err
    assert 1 == status
    assert errors.startswith(f"handoff up: {tmp_path} is no checkpoint folder")


def pasted(tmp_path: Path, text: str) -> list[str]:
    """What curl is told by a shell, with an empty environment, that `text` is pasted into."""
    script = tmp_path / "curl"
    script.write_text(f"#!{sys.executable}\nimport json, sys\nprint(json.dumps(sys.argv[1:]))\n")
    script.chmod(0o755)
    shell = subprocess.run(
        ["bash", "-c", text],
        env={"PATH": str(tmp_path)},
        executable="/bin/bash",
        capture_output=True,
        check=True,
    )
    words: list[str] = json.loads(shell.stdout)
    return words


async def test_a_router_that_does_not_say_what_it_serves_stops_nothing(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A deployment that served was torn down, as its curl line could not be made."""
    answers: list[httpx.Response | Exception] = [
        httpx.ReadTimeout("late"),
        httpx.Response(503),
        httpx.Response(200, text="no JSON"),
        httpx.Response(200, json={"data": []}),
    ]

    async def answer(_: httpx.Request) -> httpx.Response:
        now = answers[0] if len(answers) == 1 else answers.pop(0)
        if isinstance(now, Exception):
            raise now
        return now

    monkeypatch.setattr("services.cli.up._ASK_AGAIN_S", (0.0,) * 3)
    display = Recorder()
    async with httpx.AsyncClient(transport=httpx.MockTransport(answer)) as client:
        await _announce(client, Options(port=1), "decode http://a:1", None, display)
        answers[:] = [httpx.Response(503), httpx.Response(200, json={"data": [{"id": "tiny"}]})]
        await _announce(client, Options(port=1), "decode http://a:1", None, display)
    assert "serving at http://127.0.0.1:1/v1" in display.lines[0]
    assert "serving tiny at http://127.0.0.1:1/v1" in display.lines[2]


def test_the_curl_line_survives_a_shell(tmp_path: Path) -> None:
    """Pasted into a shell it sends the JSON that was meant, whatever the model is called."""
    words = pasted(tmp_path, curl_line("http://127.0.0.1:8000", "it's $HOME `x`", with_key=False))
    assert ["-i", "http://127.0.0.1:8000/v1/chat/completions"] == words[:2]
    assert {
        "model": "it's $HOME `x`",
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "temperature": 0,
    } == json.loads(words[-1])


def test_workers_are_told_by_role_and_url() -> None:
    """What `handoff doctor` wants to know; unified mode has no prefill worker."""
    urls = {"HANDOFF_PREFILL_URLS": "", "HANDOFF_DECODE_URLS": "http://a:1,http://a:2"}
    assert "decode http://a:1, decode http://a:2" == worker_urls(urls)
    assert worker_urls(urls | {"HANDOFF_PREFILL_URLS": "http://a:3"}).startswith(
        "prefill http://a:3, decode "
    )


def test_the_curl_line_works_with_a_key_that_only_the_server_has(tmp_path: Path) -> None:
    """It is not shown: the user is asked to put it in. The line alone once sent an empty key."""
    text = curl_line("http://x", "m", with_key=True)
    assert 1 == text.count("YOUR_KEY")
    assert "Authorization: Bearer key-0123456789" in pasted(
        tmp_path, text.replace("YOUR_KEY", "key-0123456789")
    )


# Serves one fake that answers as a router does, through the same function as the real ones.
_SERVE = """
import asyncio, sys
from pathlib import Path
from dataclasses import replace
from rich.console import Console
from services.cli.plan import Options
from services.cli.progress import make_display
from services.cli.up import serve
from tests.unit.services.cli.fakes import fake
folder, port, body = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
spec = replace(fake("router", body, folder), ready_url=f"http://127.0.0.1:{port}/ready")
with make_display(Console()) as display:
    asyncio.run(serve(Options(port=port), [spec], display, show_logs=False))
"""
_ROUTER = """
import http.server, json, threading
class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.send_response(200)
        self.end_headers()
        self.wfile.write(json.dumps({"data": [{"id": "tiny"}]}).encode())
    def log_message(self, *_): pass
server = http.server.ThreadingHTTPServer(("127.0.0.1", PORT), Handler)
threading.Thread(target=server.serve_forever, daemon=True).start()
while True: signal.pause()
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM, signal.SIGHUP])
def test_a_signal_ends_it_with_status_0_and_nothing_left(how: signal.Signals, tmp_path: Path) -> None:
    """Ready is told with a curl line; the signal stops the children and removes the logs."""
    (port,) = free_ports(1)
    logs = tmp_path / "logs"
    logs.mkdir()
    with subprocess.Popen(
        [sys.executable, "-c", _SERVE, str(tmp_path), str(port), _ROUTER.replace("PORT", str(port))],
        stdout=subprocess.PIPE, text=True, env={**os.environ, "TMPDIR": str(logs)},
    ) as process:  # fmt: skip
        assert process.stdout is not None
        told = []
        for line in process.stdout:
            told.append(line.strip())
            if line.startswith("curl "):
                break
        assert [] != list(logs.iterdir())
        process.send_signal(how)
        rest = process.stdout.read()
    assert 0 == process.returncode, rest
    assert f"serving tiny at http://127.0.0.1:{port}/v1 - Ctrl-C stops it" in told
    assert ["started", "stopped"] == [what for _, what, _ in events(tmp_path)]
    assert [] == survivors(tmp_path)
    assert [] == list(logs.iterdir())

"""The process around an app, as a real process: start, port trouble, drain, cut, forced exit."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
import textwrap
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

APP = """
    import asyncio, contextlib, signal, sys
    from fastapi import FastAPI, Request, Response
    from shared.asgi.install import install_http
    from shared.asgi.stream import SSE, OwnedStream, StreamHead
    from shared.errors import Unavailable
    from shared.observability import setup_logging
    from shared.server import exit_on_sigterm, serve

    exit_on_sigterm()
    setup_logging("info", "json", service="example")
    go = asyncio.Event()
    mode, port, drain_timeout_s = sys.argv[1], int(sys.argv[2]), float(sys.argv[3])

    def say(word):
        print(word, flush=True)

    class Owner:
        async def start(self):
            return StreamHead()
        async def chunks(self):
            yield b"data: one\\n\\n"
            await go.wait()
            yield b"data: two\\n\\n"
        async def aclose(self):
            say("closed")

    @contextlib.asynccontextmanager
    async def lifespan(app):
        say("starting")
        if mode == "slow-start":
            await asyncio.sleep(60)
        if mode == "bad-start":
            raise RuntimeError("no model")
        yield
        say("stopped")

    app = FastAPI(lifespan=lifespan)
    install_http(app, keys=(), trust_caller_id=False)

    @app.get("/ready")
    async def ready(request: Request):
        if request.app.state.draining:
            raise Unavailable("Draining.", retry_after_s=1)
        return {}

    @app.get("/stream")
    async def stream() -> Response:
        return OwnedStream(Owner(), SSE)

    @app.get("/hang")
    async def hang():
        say("hanging")
        await asyncio.Event().wait()

    @app.get("/go")
    async def release():
        go.set()

    if mode == "load":
        say("loading")
        signal.pause()
    raise SystemExit(serve(app, host="127.0.0.1", port=port, drain_timeout_s=drain_timeout_s,
                           on_drain=lambda: say("draining")))
"""


class Process:
    """The example app in a process of its own. `words` is what it said, `log` the JSON lines that it logged."""

    def __init__(self, folder: Path, mode: str, *, port: int, drain_timeout_s: float) -> None:
        script = folder / "app.py"
        script.write_text(textwrap.dedent(APP))
        self.popen = subprocess.Popen(
            [sys.executable, str(script), mode, str(port), str(drain_timeout_s)],
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            env={**os.environ, "PYTHONPATH": os.getcwd()},
        )
        self.port = port
        self.words: list[str] = []
        self.log: list[dict[str, Any]] = []

    @property
    def url(self) -> str:
        """Where it listens."""
        return f"http://127.0.0.1:{self.port}"

    @property
    def events(self) -> list[str]:
        """The names of the logged events."""
        return [line["event"] for line in self.log]

    def wait_for(self, word: str) -> None:
        """Return when the process has said `word`, or logged it as an event."""
        for spoken in self._lines():
            if spoken == word:
                return
        raise AssertionError(f"ended before it said {word}: {self.words} {self.log}")

    def exit_code(self) -> int:
        """Wait for the end, and for the last line."""
        code = self.popen.wait(timeout=30)
        for _ in self._lines():
            pass
        return code

    def _lines(self) -> Iterator[str]:
        assert self.popen.stdout is not None
        for raw in self.popen.stdout:
            text = raw.decode().rstrip()
            if text.startswith("{"):
                self.log.append(json.loads(text))
                yield self.log[-1]["event"]
            else:
                self.words.append(text)
                yield text


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


class Launcher:
    """Starts processes, and kills those that a failed test leaves behind."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self.started: list[Process] = []

    def __call__(self, mode: str = "", *, drain_timeout_s: float = 30, port: int | None = None) -> Process:
        port = _free_port() if port is None else port
        self.started.append(Process(self._folder, mode, port=port, drain_timeout_s=drain_timeout_s))
        return self.started[-1]

    def up(self, *, drain_timeout_s: float = 30) -> Process:
        """A process that answers."""
        process = self(drain_timeout_s=drain_timeout_s)
        process.wait_for("listening")
        return process


@pytest.fixture
def launch(tmp_path: Path) -> Iterator[Launcher]:
    """See Launcher."""
    launcher = Launcher(tmp_path)
    yield launcher
    for process in launcher.started:
        process.popen.kill()
        process.popen.wait()
        assert process.popen.stdout is not None
        process.popen.stdout.close()


def test_the_first_signal_drains(launch: Launcher) -> None:
    """A running stream ends whole, new requests and /ready are told 503, then the exit code is 0."""
    process = launch.up()
    with httpx.stream("GET", f"{process.url}/stream") as answer:
        pieces = answer.iter_raw()
        assert b"data: one\n\n" == next(pieces)
        process.popen.send_signal(signal.SIGTERM)
        process.wait_for("draining")
        assert 503 == httpx.get(f"{process.url}/ready").status_code
        assert process.popen.poll() is None
        httpx.get(f"{process.url}/go")
        assert b"data: two\n\n" == b"".join(pieces)
    assert 0 == process.exit_code()
    assert ["starting", "draining", "closed", "stopped"] == process.words
    (drained,) = [line for line in process.log if line["event"] == "drained"]
    assert 0 == drained["cut"]


def test_an_idle_process_stops_at_once(launch: Launcher) -> None:
    """On SIGINT as on SIGTERM; an idle keep-alive connection does not hold it up."""
    process = launch.up()
    with httpx.Client(base_url=process.url) as client:
        client.get("/ready")
        process.popen.send_signal(signal.SIGINT)
        assert 0 == process.exit_code()
    assert ["listening", "draining", "drained"] == process.events


def test_what_outlives_the_drain_time_is_cut(launch: Launcher) -> None:
    """A stream breaks off instead of seeming complete, a whole answer is a 503, owners are closed, exit 0."""
    process = launch.up(drain_timeout_s=0.2)
    with socket.create_connection(("127.0.0.1", process.port), timeout=20) as hanging:
        hanging.sendall(b"GET /hang HTTP/1.1\r\nHost: x\r\n\r\n")
        process.wait_for("hanging")
        with httpx.stream("GET", f"{process.url}/stream") as answer:
            pieces = answer.iter_raw()
            assert b"data: one\n\n" == next(pieces)
            process.popen.send_signal(signal.SIGTERM)
            with pytest.raises(httpx.RemoteProtocolError):
                next(pieces)
        whole = hanging.makefile("rb").read()
    assert whole.startswith(b"HTTP/1.1 503 ")
    assert b'"code":"unavailable"' in whole
    assert 0 == process.exit_code()
    assert ["closed", "stopped"] == process.words[-2:]
    assert ["cancelled", "cancelled"] == [
        line["ending"] for line in process.log if line["event"] == "request" and line["path"] != "/ready"
    ]


def test_the_second_signal_exits_at_once(launch: Launcher) -> None:
    """Whatever still runs."""
    process = launch.up()
    with httpx.stream("GET", f"{process.url}/stream") as answer:
        pieces = answer.iter_raw()  # kept: the connection is closed with its iterator
        next(pieces)
        process.popen.send_signal(signal.SIGTERM)
        process.wait_for("draining")
        process.popen.send_signal(signal.SIGINT)
        assert 128 + signal.SIGINT == process.exit_code()
    assert "forced_exit" == process.events[-1]


def test_a_taken_port_is_one_line_and_exit_code_1(launch: Launcher) -> None:
    """Before the app starts to load anything, and without a stack trace."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        process = launch(port=taken.getsockname()[1])
        assert 1 == process.exit_code()
    (line,) = process.log
    assert ("cannot_listen", "Address already in use") == (line["event"], line["reason"])
    assert [] == process.words


def test_a_failed_start_is_exit_code_1(launch: Launcher) -> None:
    """With the reason in the log."""
    process = launch("bad-start")
    assert 1 == process.exit_code()
    assert "no model" in repr(process.log)


@pytest.mark.parametrize(
    ("mode", "word", "code"), [("slow-start", "starting", 0), ("load", "loading", 128 + signal.SIGTERM)]
)
def test_a_signal_ends_a_process_that_still_loads(launch: Launcher, mode: str, word: str, code: int) -> None:
    """In the app's own start as well as before it, where process 1 would not hear it without a handler."""
    process = launch(mode)
    process.wait_for(word)
    process.popen.send_signal(signal.SIGTERM)
    assert code == process.exit_code()

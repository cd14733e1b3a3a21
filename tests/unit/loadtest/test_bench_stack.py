"""The stacks that a benchmark starts are fair, waited for, and stopped."""

from __future__ import annotations

import os
import signal
import sys

import httpx
import pytest
import typer.main

from services.cli.bench_stack import (
    TOPOLOGIES,
    Compute,
    StackFailed,
    Topology,
    busy,
    free_port,
    running,
    sigterm_as_interrupt,
    up_command,
    up_environ,
)
from services.cli.main import app

SERVER = """
import http.server, sys
class Handler(http.server.BaseHTTPRequestHandler):
    asked = 0
    def do_GET(self):
        Handler.asked += 1
        self.send_response(200 if Handler.asked > int(sys.argv[2]) else 503)
        self.end_headers()
    def log_message(self, *_):
        pass
http.server.HTTPServer(("127.0.0.1", int(sys.argv[1])), Handler).serve_forever()
"""


def test_both_topologies_get_the_same_compute() -> None:
    """Threads are equal, and the unified worker has the cores that decode has in PD."""
    assert Compute.fair((0, 1)) == Compute(1, "1")
    assert Compute.fair(range(9)) == Compute(4, "5-8")
    assert Compute.fair((3,)) == Compute(1, None)
    assert Compute.fair((0, 1), threads_per_worker=2) == Compute(2, "1")


def test_a_busy_host_is_told() -> None:
    """More than a quarter of the cores at work before the benchmark begins is worth a warning."""
    load, warning = busy(range(1_000_000))
    assert (load >= 0, warning) == (True, None)
    load, warning = busy(())
    assert (warning is not None) == (load > 0)


def test_what_the_user_set_stays() -> None:
    """HANDOFF_CPUS of the caller is used for both; otherwise only the unified worker is told its cores."""
    compute = Compute(1, "1")
    assert up_environ("pd", compute, {"A": "b"}) == {"A": "b"}
    assert up_environ("unified", compute, {"A": "b"}) == {"A": "b", "HANDOFF_CPUS": "1"}
    assert up_environ("unified", compute, {"HANDOFF_CPUS": "0"}) == {"HANDOFF_CPUS": "0"}


@pytest.mark.parametrize("topology", TOPOLOGIES)
def test_the_command_is_one_that_handoff_up_takes(topology: Topology) -> None:
    """Its own parser reads the options that are passed to it."""
    command = up_command(topology, port=1234, compute=Compute(3, None), model="folder")
    assert command[1:4] == ["-m", "services.cli.main", "up"]
    group = typer.main.get_group(app)
    with group.make_context("handoff", command[3:4]) as context:
        parser = group.get_command(context, "up")
        assert parser is not None
        read = parser.make_context("up", command[4:]).params
    assert (read["port"], read["threads_per_worker"], read["model"]) == (1234, 3, "folder")
    assert (topology == "unified") == read["unified"]


def test_a_stack_is_used_when_ready_and_stopped_after() -> None:
    """503 is not ready; after the context nobody listens any more."""
    port = free_port()
    command = [sys.executable, "-c", SERVER, str(port), "2"]
    with running(command, f"http://127.0.0.1:{port}", environ=os.environ, timeout_s=30) as base_url:
        assert httpx.get(base_url + "/ready", trust_env=False).status_code == 200
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"http://127.0.0.1:{port}/ready", trust_env=False)


@pytest.mark.parametrize(
    ("command", "why"),
    [
        ([sys.executable, "-c", "raise SystemExit(3)"], "exit status 3"),
        ([sys.executable, "-c", "import time; time.sleep(60)"], "not ready after 0.3 s"),
    ],
)
def test_a_stack_that_does_not_come_up(command: list[str], why: str) -> None:
    """An early end and a time-out are one clear error each."""
    timeout_s = 0.3 if "not ready" in why else 30.0
    with (
        pytest.raises(StackFailed, match=why),
        running(command, f"http://127.0.0.1:{free_port()}", environ=os.environ, timeout_s=timeout_s),
    ):
        pytest.fail("it was never ready")


def test_sigterm_unwinds_like_ctrl_c() -> None:
    """So the stacks of an interrupted benchmark are stopped; the old handler is put back."""
    before = signal.getsignal(signal.SIGTERM)
    with pytest.raises(KeyboardInterrupt), sigterm_as_interrupt():
        signal.raise_signal(signal.SIGTERM)
    assert before == signal.getsignal(signal.SIGTERM)

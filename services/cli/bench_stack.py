"""One serving stack on this host for the length of a benchmark: `handoff up` as a child process.

Started, waited for until its router is ready, and stopped whatever happens in between.
"""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Literal

import httpx

from services.cli.plan import format_cores, split_cores

Topology = Literal["pd", "unified"]
TOPOLOGIES: tuple[Topology, ...] = ("pd", "unified")

_POLL_S = 0.1
_STOP_S = 30.0


class StackFailed(RuntimeError):
    """A stack did not become ready; its own output, on stderr, has said why."""


@dataclass(frozen=True, slots=True)
class Compute:
    """What every worker of both topologies gets: so many threads, and the unified worker decode's own cores.

    cpus: as HANDOFF_CPUS writes them; None leaves the choice to `handoff up`.
    """

    threads_per_worker: int
    cpus: str | None

    @classmethod
    def fair(cls, cores: Sequence[int], threads_per_worker: int | None = None) -> Compute:
        """Of a host with these cores. By default as many threads as a worker of two has cores for itself."""
        decode_cores = split_cores(cores, 2)[1]
        cpus = format_cores(decode_cores) if len(cores) > 1 else None
        return cls(threads_per_worker or len(decode_cores), cpus)


def busy(cores: Sequence[int]) -> tuple[float, str | None]:
    """How much runs on this host already (load average of a minute), and a warning if that spoils a measurement."""
    load = os.getloadavg()[0]
    if load <= len(cores) / 4:
        return load, None
    return load, f"this host is busy: load average {load:.1f} on {len(cores)} cores; the numbers will be off"


def free_port() -> int:
    """A port that nobody listens on now. Somebody else may take it before its user does: the start fails then."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port: int = server.getsockname()[1]
        return port


def up_environ(topology: Topology, compute: Compute, environ: Mapping[str, str]) -> dict[str, str]:
    """`environ`, with the unified worker on the cores that "pd" gives to decode. What the user set stays."""
    chosen = {} if compute.cpus is None or topology == "pd" else {"HANDOFF_CPUS": compute.cpus}
    return {**chosen, **environ}


def up_command(topology: Topology, *, port: int, compute: Compute, model: str | None) -> list[str]:
    """The `handoff up` that serves this topology: one decode worker, and for "pd" one prefill worker before it."""
    command = [sys.executable, "-m", "services.cli.main", "up", "--host", "127.0.0.1", "--port", str(port)]
    command += ["--threads-per-worker", str(compute.threads_per_worker)]
    command += ["--unified"] if topology == "unified" else ["--prefill", "1", "--decode", "1"]
    return command if model is None else [*command, "--model", model]


def worker_command(role: str, model: str, secret: str) -> tuple[list[str], str, dict[str, str]]:
    """A single worker on a free port: command, URL, and the settings that make it so."""
    port = free_port()
    own = {
        "HANDOFF_MODEL": model,
        "HANDOFF_SECRET": secret,
        "HANDOFF_HOST": "127.0.0.1",
        "HANDOFF_PORT": str(port),
    }
    return [sys.executable, "-m", "services.cli.main", role], f"http://127.0.0.1:{port}", own


@contextmanager
def spawned(command: Sequence[str], environ: Mapping[str, str]) -> Iterator[subprocess.Popen[bytes]]:
    """A child process while the context is open; its output goes to our stderr."""
    process = subprocess.Popen(command, env=dict(environ), stdin=subprocess.DEVNULL, stdout=2)
    try:
        yield process
    finally:
        stop(process)


@contextmanager
def running(
    command: Sequence[str], base_url: str, *, environ: Mapping[str, str], timeout_s: float
) -> Iterator[str]:
    """Run a stack while the context is open; gives base_url once /ready answers 200.

    Its output goes to our stderr, so that stdout stays the benchmark's. Raises StackFailed.
    """
    with spawned(command, environ) as process:
        wait_until_ready(process, base_url, timeout_s)
        yield base_url


@contextmanager
def sigterm_as_interrupt() -> Iterator[None]:
    """SIGTERM ends the benchmark as Ctrl-C does, so that the stacks it started are stopped too."""
    before = signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def wait_until_ready(process: subprocess.Popen[bytes], base_url: str, timeout_s: float) -> None:
    """Return once /ready answers 200. Raises StackFailed if the process ends before, or takes too long."""
    give_up_s = time.monotonic() + timeout_s
    with httpx.Client(base_url=base_url, timeout=5.0, trust_env=False) as http:
        while not _is_ready(http):
            if process.poll() is not None:
                raise StackFailed(f"the stack ended with exit status {process.returncode}")
            if time.monotonic() > give_up_s:
                raise StackFailed(f"the stack was not ready after {timeout_s:g} s")
            time.sleep(_POLL_S)


def _is_ready(http: httpx.Client) -> bool:
    try:
        return http.get("/ready").status_code == httpx.codes.OK
    except httpx.TransportError:
        return False


def stop(process: subprocess.Popen[bytes]) -> None:
    """Ask politely, as Ctrl-C would, then insist."""
    if process.poll() is None:
        process.send_signal(signal.SIGTERM)
    try:
        process.wait(timeout=_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        process.wait()

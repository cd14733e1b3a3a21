"""A whole handoff in real processes, for what threads cannot show: SIGKILL, SIGSTOP, restarts."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx

from tests.support import http
from tests.support.cluster import SECRET, wait_until

START_TIMEOUT_S = 120.0


class Process:
    """One `handoff ROLE` process that can be killed and started again on the same port.

    It stops when its stdin is closed, so that none outlives a test run that was killed.
    """

    def __init__(self, role: str, log: Path, environ: dict[str, str]) -> None:
        self.role = role
        self.port = _free_port()
        self.url = f"http://127.0.0.1:{self.port}"
        self._log = log
        self._environ = environ
        self._process: subprocess.Popen[bytes] | None = None

    def start(self) -> None:
        """Returns at once; `wait_ready` waits."""
        environ = {k: v for k, v in os.environ.items() if not k.startswith("HANDOFF_")}
        environ |= {"HANDOFF_PORT": str(self.port), "HANDOFF_SECRET": SECRET, "OMP_NUM_THREADS": "1"}
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                [sys.executable, "-m", "services.cli.main", self.role, "--stop-with-stdin"],
                env=environ | self._environ,
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=log,
            )

    def wait_ready(self) -> None:
        """Until /ready says 200; a process that died meanwhile is an error with its log."""
        wait_until(self._is_ready, START_TIMEOUT_S)

    def signal(self, number: signal.Signals) -> None:
        """Send a signal."""
        assert self._process is not None
        self._process.send_signal(number)

    def kill(self) -> None:
        """SIGKILL, and reap."""
        self.signal(signal.SIGKILL)
        self.wait()

    def wait(self, timeout_s: float = 30.0) -> int:
        """The exit code."""
        assert self._process is not None
        code = self._process.wait(timeout_s)
        assert self._process.stdin is not None
        self._process.stdin.close()
        return code

    @property
    def is_running(self) -> bool:
        return self._process is not None and self._process.poll() is None

    def log_text(self) -> str:
        """Everything that it has logged."""
        return self._log.read_text() if self._log.exists() else ""

    def _is_ready(self) -> bool:
        assert self.is_running, self.log_text()[-3000:]
        try:
            return http.get(f"{self.url}/ready", timeout=5).status_code == 200
        except httpx.TransportError:
            return False


class Deployment:
    """Router and workers."""

    def __init__(self, router: Process, prefill: list[Process], decode: list[Process]) -> None:
        self.router = router
        self.prefill = prefill
        self.decode = decode

    @property
    def url(self) -> str:
        return self.router.url

    @property
    def processes(self) -> list[Process]:
        return [*self.prefill, *self.decode, self.router]

    def heal(self) -> None:
        """Start again what is gone, and wait until the router sees every worker ready."""
        for process in self.processes:
            if not process.is_running:
                process.start()
        for process in self.processes:
            process.wait_ready()
        wait_until(self._all_seen, START_TIMEOUT_S)

    def worker_named(self, name: str) -> Process:
        """The worker that calls itself `name` (p0, p1, d0, ...)."""
        return (self.prefill if name[0] == "p" else self.decode)[int(name[1:])]

    def _all_seen(self) -> bool:
        workers = http.get(f"{self.url}/ready", timeout=5).json()["workers"]
        return all(worker["usable"] for worker in workers)


@contextmanager
def deploy(model: Path, logs: Path, *, num_prefill: int = 2, num_decode: int = 2) -> Iterator[Deployment]:
    """A ready deployment; every process is killed at the end."""
    common = {"HANDOFF_MODEL": str(model), "HANDOFF_CACHE_DIR": str(logs / "cache")}
    worker = common | {"HANDOFF_KV_POOL_BYTES": str(8 << 20), "HANDOFF_NUM_THREADS": "1"}
    prefill = [
        Process("prefill", logs / f"p{i}.log", worker | {"HANDOFF_NAME": f"p{i}"}) for i in range(num_prefill)
    ]
    decode = [
        Process("decode", logs / f"d{i}.log", worker | {"HANDOFF_NAME": f"d{i}"}) for i in range(num_decode)
    ]
    router = Process(
        "router",
        logs / "router.log",
        common
        | {
            "HANDOFF_PREFILL_URLS": ",".join(p.url for p in prefill),
            "HANDOFF_DECODE_URLS": ",".join(d.url for d in decode),
            "HANDOFF_SERVED_MODEL_NAME": "tiny",
            "HANDOFF_HEALTH_INTERVAL_S": "0.5",
        },
    )
    deployment = Deployment(router, prefill, decode)
    try:
        deployment.heal()
        yield deployment
    finally:
        for process in deployment.processes:
            if process.is_running:
                process.signal(signal.SIGCONT)
                process.kill()


def _free_port() -> int:
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        return int(sock.getsockname()[1])

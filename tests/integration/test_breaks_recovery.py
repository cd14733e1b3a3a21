"""`handoff up` with one worker of each kind: a killed one is started again, and its requests go on."""

from __future__ import annotations

import json
import os
import signal
import socket
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support import http
from tests.support.cluster import metric, wait_until

BODY: dict[str, Any] = {
    "prompt": [7, 8, 9],
    "max_tokens": 400,
    "seed": 5,
    "ignore_eos": True,
    "return_token_ids": True,
    "stream": True,
}


@pytest.fixture(scope="module")
def up(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[str, int]]:
    """URL and process id of a running `handoff up`."""
    folder = tmp_path_factory.mktemp("up")
    with socket.socket() as sock:
        sock.bind(("127.0.0.1", 0))
        port = sock.getsockname()[1]
    environ = {k: v for k, v in os.environ.items() if not k.startswith("HANDOFF_")}
    environ |= {
        "HANDOFF_CACHE_DIR": str(folder),
        "HANDOFF_KV_POOL_BYTES": str(8 << 20),
        "OMP_NUM_THREADS": "1",
    }
    command = [sys.executable, "-m", "services.cli.main", "up", "--model", str(tiny_model)]
    with (folder / "up.log").open("wb") as log:
        process = subprocess.Popen(
            [*command, "--port", str(port), "--threads-per-worker", "1"], env=environ, stdout=log, stderr=log
        )
    url = f"http://127.0.0.1:{port}"
    try:
        wait_until(lambda: _is_ready(url), 120)
        yield url, process.pid
    finally:
        process.terminate()
        process.wait(60)


def _is_ready(url: str) -> bool:
    try:
        return http.get(f"{url}/ready").status_code == 200
    except httpx.TransportError:
        return False


def _child(pid: int, role: str) -> int:
    """The process id of the supervisor's child of this role."""
    for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split():
        if role in Path(f"/proc/{child}/cmdline").read_text().split("\0"):
            return int(child)
    raise AssertionError(f"no {role} process")


def _stream(url: str, kill: int | None = None) -> list[int]:
    """All token ids of the answer; `kill` dies after the tenth event."""
    ids: list[int] = []
    num_events = 0
    with http.stream("POST", f"{url}/v1/completions", json=BODY, timeout=150) as response:
        for line in response.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                ids += choice["token_ids"]
            num_events += 1
            if num_events == 10 and kill is not None:
                os.kill(kill, signal.SIGKILL)
    return ids


def test_the_only_decode_worker_dies(up: tuple[str, int]) -> None:
    """The client sees a pause as long as the worker takes to start, and the same tokens."""
    url, pid = up
    expected = _stream(url)
    assert 400 == len(expected)

    assert expected == _stream(url, kill=_child(pid, "decode"))

    wait_until(lambda: metric(url, "handoff_in_flight") == 0)
    assert metric(url, "handoff_retries_total") == 1

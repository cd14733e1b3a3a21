"""NIXL between two network namespaces that a virtual cable connects, as between two hosts without RDMA."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
ADDRESSES = ("10.213.77.1", "10.213.77.2")
LIMIT_S = 60


def ip(*arguments: str) -> None:
    """Run `ip`; raises CalledProcessError if it is not permitted."""
    subprocess.run(["ip", *arguments], check=True, capture_output=True, timeout=10)


@contextmanager
def two_networks() -> Iterator[tuple[str, str]]:
    """Two namespaces that can reach each other and nothing else. Raises CalledProcessError."""
    names = [f"handoff-{os.getpid()}-{side}" for side in "ab"]
    ends = [f"ho{os.getpid() % 100000}{side}" for side in "ab"]
    with ExitStack() as stack:
        for name in names:
            ip("netns", "add", name)
            stack.callback(ip, "netns", "del", name)
        ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
        for name, end, address in zip(names, ends, ADDRESSES, strict=True):
            ip("link", "set", end, "netns", name)
            ip("-n", name, "addr", "add", f"{address}/24", "dev", end)
            ip("-n", name, "link", "set", end, "up")
            ip("-n", name, "link", "set", "lo", "up")
        yield names[0], names[1]


@pytest.fixture(scope="module")
def networks() -> Iterator[tuple[str, str]]:
    """Skips where the extra is missing or the kernel does not let us make a network namespace."""
    if find_spec("nixl_cu12") is None or shutil.which("ip") is None:
        pytest.skip("the extra handoff[nixl] or the command ip is not installed")
    with ExitStack() as stack:
        try:
            made = stack.enter_context(two_networks())
        except (subprocess.CalledProcessError, OSError) as exc:
            pytest.skip(f"network namespaces are not permitted here: {exc}")
        yield made


@contextmanager
def peer(network: str, role: str, env: dict[str, str]) -> Iterator[subprocess.Popen[str]]:
    """One side (tests.support.nixl_peer) in its network; killed at the end."""
    command = ["ip", "netns", "exec", network, sys.executable, "-m", "tests.support.nixl_peer", role]
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(ROOT), **env},
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
    )
    with process:
        try:
            yield process
        finally:
            with suppress(ProcessLookupError):
                process.kill()


@pytest.mark.slow
@pytest.mark.parametrize("env", [{}, {"UCX_TLS": "tcp"}], ids=["whatever UCX finds", "tcp"])
def test_kv_crosses_networks(networks: tuple[str, str], env: dict[str, str]) -> None:
    """Several hand-offs arrive whole and verified, and all of them go over NIXL."""
    with (
        peer(networks[1], f"receive {ADDRESSES[1]}", env) as receiver,
        peer(networks[0], "send", env) as sender,
    ):
        assert receiver.stdin is not None
        assert receiver.stdout is not None
        assert sender.stdin is not None
        sender.stdin.write(receiver.stdout.readline())
        sender.stdin.flush()
        sent, _ = sender.communicate(timeout=LIMIT_S)
        receiver.stdin.close()
        received = receiver.stdout.read()
    assert ["nixl"] * 3 == sent.split()
    assert ["200 nixl whole"] * 3 == received.splitlines()

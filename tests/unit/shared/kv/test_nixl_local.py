"""When NIXL may read to where the bytes belong: all that must hold, and none of it guessed."""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from contextlib import closing
from pathlib import Path

import pytest

from shared.kv.stream import Stream
from shared.kv.transports import nixl_local
from shared.kv.transports.nixl_local import kernel_copies, pid_namespace
from shared.kv.transports.nixl_peers import NixlPeers
from shared.kv.transports.nixl_wire import TOKEN_BYTES, Terms
from tests.unit.shared.kv.blobs import SHAPE, Pool
from tests.unit.shared.kv.conftest import Agents

OWN = pid_namespace()


@pytest.fixture(autouse=True)
def _permitted(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A host on which everything is allowed; each test forbids something."""
    monkeypatch.delenv("UCX_TLS", raising=False)
    monkeypatch.setattr(nixl_local, "_PTRACE_SCOPE", tmp_path / "ptrace_scope")


@pytest.mark.parametrize(
    ("setting", "copies"),
    [
        ("", True),
        ("all", True),
        ("tcp,cma", True),
        ("rc,sm,tcp", True),
        ("shm", True),
        ("cma:0", True),
        ("tcp", False),
        ("tcp,self", False),
        ("rc,ud", False),
        ("^tcp", True),
        ("^cma", False),
        ("^tcp,sm", False),
    ],
)
def test_what_ucx_is_told_counts(monkeypatch: pytest.MonkeyPatch, setting: str, *, copies: bool) -> None:
    """Its own list of transports, with or without this one."""
    monkeypatch.setenv("UCX_TLS", setting)
    assert copies == kernel_copies()


@pytest.mark.parametrize(
    ("scope", "capabilities", "copies"),
    [
        ("0", 0, True),
        ("1", 0, False),
        ("1", 1 << 19, True),
        ("2", 1 << 19, True),
        ("3", 1 << 19, False),
        ("?", 0, False),
    ],
)
def test_yama_counts(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, scope: str, capabilities: int, *, copies: bool
) -> None:
    """Most distributions let a process read its children alone."""
    (tmp_path / "ptrace_scope").write_text(f"{scope}\n")
    (tmp_path / "status").write_text(f"Name:\tx\nCapEff:\t{capabilities:016x}\n")
    monkeypatch.setattr(nixl_local, "_OWN_STATUS", tmp_path / "status")
    assert copies == kernel_copies()


def test_a_filter_that_forbids_the_call_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """A container's, for instance: the call then fails, also on the process itself."""
    monkeypatch.setattr("os.getpid", lambda: 2**22 + 1)
    assert not kernel_copies()


def connected(host: str) -> tuple[Stream, socket.socket]:
    """A TCP connection of this host with itself, or with its other address."""
    with socket.create_server(("127.0.0.1", 0)) as listening:
        other = socket.create_connection(listening.getsockname(), source_address=(host, 0))
        accepted, _ = listening.accept()
    return Stream(accepted), other


@pytest.mark.parametrize(
    ("namespace", "host", "environment", "is_direct"),
    [
        (OWN, "127.0.0.1", {}, True),
        (OWN + 1, "127.0.0.1", {}, False),
        (0, "127.0.0.1", {}, False),
        (OWN, "127.0.0.2", {}, False),
        (OWN, "127.0.0.1", {"UCX_TLS": "tcp"}, False),
    ],
)
def test_only_a_peer_beside_us_reads_to_the_pool(
    nixl: Agents,
    monkeypatch: pytest.MonkeyPatch,
    namespace: int,
    host: str,
    environment: Mapping[str, str],
    *,
    is_direct: bool,
) -> None:
    """The same host and pid namespace, where the kernel copies; else the pool is not even registered."""
    for name, value in environment.items():
        monkeypatch.setenv(name, value)
    pool = Pool(SHAPE, num_tokens=10).memory
    stream, other = connected(host)
    with other, closing(stream), closing(NixlPeers(nixl.receiving, pool)) as peers:
        found = peers.pool_for(stream, Terms(16, 0, bytes(TOKEN_BYTES), namespace))
        assert (pool if is_direct else None) is found


def test_the_pool_stays_registered_while_somebody_reads(
    nixl: Agents, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A read that outlives the listener must not find the library without its memory."""
    peers = NixlPeers(nixl.receiving, Pool(SHAPE, num_tokens=10).memory)
    registered = peers._registered
    assert registered is not None
    closed: list[bool] = []
    close = registered.close

    def noted() -> None:
        closed.append(True)
        close()

    monkeypatch.setattr(registered, "close", noted)
    name, landing = peers.take(nixl.sending.metadata())
    peers.close()
    assert not closed
    peers.give_back(name, landing, [], is_broken=False)
    peers.close()
    assert [True] == closed


def test_own_namespace_is_known() -> None:
    """As the kernel counts it."""
    assert os.stat("/proc/self/ns/pid").st_ino == OWN

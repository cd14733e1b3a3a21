"""Facts about the machine."""

from __future__ import annotations

import os
import socket

import pytest

from services.cli.host import free_ports, look_at_gpus, look_at_host, visible_gpus, why_not_listen

MIB = 1 << 20


def test_free_ports_are_distinct_and_can_be_listened_on() -> None:
    """What is handed out can be used."""
    ports = free_ports(8)
    assert 8 == len(set(ports))
    assert [None] * 8 == [why_not_listen("127.0.0.1", port) for port in ports]


def test_a_used_port_is_told() -> None:
    """The reason is the system's own words."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        assert "Address already in use" == why_not_listen("127.0.0.1", server.getsockname()[1])


def test_a_host_that_is_no_address_of_ours_is_told() -> None:
    """Not only used ports keep a server from listening."""
    assert why_not_listen("192.0.2.1", 8000) is not None
    assert why_not_listen("no such host", 8000) is not None


def test_only_cores_that_we_may_use_are_counted() -> None:
    """A container or taskset limits the cores, whatever the machine has."""
    assert os.sched_getaffinity(0) == set(look_at_host({}, num_ports=1).cores)


@pytest.mark.parametrize(
    ("visible", "expected"),
    [
        (None, (100 * MIB, 200 * MIB, 0)),
        ("", ()),
        ("1", (200 * MIB,)),
        ("1,0", (200 * MIB, 100 * MIB)),
        ("GPU-8f", (100 * MIB,)),
    ],
)
def test_gpus_are_those_a_child_would_see(visible: str | None, expected: tuple[int, ...]) -> None:
    """CUDA_VISIBLE_DEVICES chooses and orders; a card that tells no number counts as one without memory."""
    assert expected == visible_gpus("100\n200\n[N/A]\n", visible)


def test_no_driver_means_no_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """A machine without nvidia-smi is a CPU machine."""
    monkeypatch.setenv("PATH", "")
    assert () == look_at_gpus({})

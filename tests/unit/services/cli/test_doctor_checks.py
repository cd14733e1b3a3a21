"""Findings of `handoff doctor` that need no measurement."""

from __future__ import annotations

from typing import Any

import pytest

from services.cli.doctor_checks import Clock, Finding, Seen, check_hosts, check_pair
from shared.wire import Fingerprint, Role, WorkerInfo
from shared.wire_probe import HostReport

FINGERPRINT = Fingerprint(
    weights="w",
    config="c",
    tokenizer="t",
    dtype="float32",
    layout="l",
    rope="r",
    num_layers=2,
    num_kv_heads=1,
    head_dim=4,
)


def info(role: Role, /, **changes: Any) -> WorkerInfo:
    """A healthy worker, but for `changes`."""
    fields: dict[str, Any] = {
        "protocol": 2,
        "role": role,
        "name": role,
        "boot": "b",
        "model": "m",
        "fingerprint": FINGERPRINT,
        "max_model_len": 100,
        "num_blocks": 100,
        "block_size": 16,
        "ready": True,
        "draining": False,
        "load": 0,
    }
    return WorkerInfo(**fields | changes)


def seen(role: Role, clock: Clock | None = None, **changes: Any) -> Seen:
    """A healthy worker's host, but for `changes`."""
    fields: dict[str, Any] = {
        "role": role,
        "host_id": "h",
        "cpus": [0] if role == "prefill" else [1],
        "chunk_size": 256,
        "max_num_seqs": 64,
        "open_files": 20,
        "max_open_files": 1024,
        "available_memory_bytes": 1 << 33,
        "shm_bytes": 64 << 20 if role == "prefill" else None,
        "copy_bytes_per_s": 1e9,
        "digest_bytes_per_s": 1e9,
        "measured_s": 0.01,
        "monotonic_s": 5.0,
        "wall_s": 5.0,
    }
    return Seen(info(role), HostReport(**fields | changes), clock or Clock(1.0, 0.0, 0.0, 0.001))


def levels(findings: list[Finding]) -> list[tuple[str, str]]:
    """What is not simply ok."""
    return [(finding.what, finding.level) for finding in findings if finding.level != "ok"]


def test_a_healthy_pair_has_nothing_but_ok() -> None:
    """No notes, no problems."""
    assert [] == levels(list(check_pair(info("prefill"), info("decode"))))
    assert [] == levels(list(check_hosts(seen("prefill"), seen("decode"))))


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"role": "prefill"}, ("role", "problem")),
        ({"protocol": 3}, ("protocol", "problem")),
        ({"ready": False}, ("ready", "problem")),
        ({"load": 3}, ("load", "note")),
        ({"fingerprint": FINGERPRINT.model_copy(update={"dtype": "bfloat16"})}, ("fingerprint", "problem")),
    ],
)
def test_what_is_wrong_with_a_pair_is_told(changes: dict[str, Any], found: tuple[str, str]) -> None:
    """One finding for each, and a problem only where no request could be served."""
    assert [found] == levels(list(check_pair(info("prefill"), info("decode", **changes))))


def test_a_pair_whose_dtype_is_of_a_later_version_is_told() -> None:
    """It used to end in a KeyError."""
    later = {"fingerprint": FINGERPRINT.model_copy(update={"dtype": "float4"})}
    found = levels(list(check_pair(info("prefill", **later), info("decode", **later))))
    assert [("fingerprint", "problem")] == found


@pytest.mark.parametrize(
    ("changes", "found"),
    [
        ({"cpus": [0, 1]}, ("cores", "note")),
        ({"shm_bytes": 0}, ("shm", "note")),
        ({"max_open_files": 64}, ("descriptors", "problem")),
        ({"available_memory_bytes": 1 << 20}, ("memory", "problem")),
        ({"clock": Clock(1.05, 0.01, 0.0, 0.0)}, ("clocks", "problem")),
        ({"clock": Clock(1.0, 0.0, 3.0, 0.0)}, ("clocks", "note")),
    ],
)
def test_what_is_wrong_with_a_host_is_told(changes: dict[str, Any], found: tuple[str, str]) -> None:
    """Cores shared, no shared memory, few descriptors, little memory, clocks that run or stand wrong."""
    assert [found] == levels(list(check_hosts(seen("prefill", **changes), seen("decode"))))


def test_a_clock_is_not_blamed_for_a_slow_answer() -> None:
    """A rate is wrong only beyond what its measurement can be wrong by."""
    clock = Clock(0.94, 0.08, 0.0, 0.02)

    assert [] == levels(list(check_hosts(seen("prefill", clock), seen("decode"))))


def test_two_hosts_need_no_shared_memory_and_no_cores_apart() -> None:
    """Equal core numbers mean nothing there."""
    assert [] == levels(
        list(check_hosts(seen("prefill", cpus=[1], shm_bytes=0), seen("decode", host_id="other")))
    )

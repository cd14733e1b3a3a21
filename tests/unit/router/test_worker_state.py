"""Leases and state changes of one worker."""

from __future__ import annotations

import pytest

from router.workers.state import Worker
from shared.wire import WorkerInfo
from tests.unit.router.test_policy import fingerprint


def info(boot: str = "b1") -> WorkerInfo:
    """A healthy worker's answer."""
    return WorkerInfo(
        protocol=2, role="decode", name="d", boot=boot, model="m", fingerprint=fingerprint(), max_model_len=8,
        num_blocks=4, block_size=2, ready=True, draining=False, load=0,
    )  # fmt: skip


def test_leases_cannot_leak() -> None:
    """A lease is given back by an exception as well."""
    worker = Worker("decode", "http://d", lambda: None)

    def fail() -> None:
        with worker.lease(7):
            assert (1, 7) == (worker.outstanding_requests, worker.outstanding_tokens)
            raise RuntimeError

    with pytest.raises(RuntimeError):
        fail()
    assert (0, 0) == (worker.outstanding_requests, worker.outstanding_tokens)


def test_only_changes_are_announced() -> None:
    """A good look that says nothing new is silent; a restart, a loss and a recovery are not."""
    changes: list[bool] = []
    worker = Worker("decode", "http://d", lambda: changes.append(worker.usable))
    worker.seen(info(), None)
    worker.seen(info(), None)
    worker.seen(info("b2"), None)
    worker.lost("gone")
    worker.lost("gone")
    worker.seen(info("b2"), None)
    assert [True, True, False, True] == changes


def test_the_second_missed_look_tells_who_waits() -> None:
    """One missed look is no reason to give a waiting request up; two are, and a good one starts afresh."""
    told: list[str] = []
    worker = Worker("decode", "http://d", lambda: None)

    def tell() -> None:
        told.append("silent")

    worker.watch(tell)
    worker.missed("late")
    worker.seen(info(), None)
    worker.missed("late")
    assert [] == told
    worker.missed("late")
    worker.unwatch(tell)
    worker.missed("late")
    assert ["silent"] == told

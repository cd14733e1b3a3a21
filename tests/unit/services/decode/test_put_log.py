"""Transfers that failed are in decode's log: a refusal with its reason, a bug with its traceback."""

from __future__ import annotations

from dataclasses import replace
from http import HTTPStatus

import pytest
import structlog

from services.decode.put_log import log_put
from shared.errors import EngineFault, ReservationGone, TransportFailed
from shared.kv.answers import NotAPut, answer_of
from shared.kv.book import Received
from shared.kv.progress import FirstTokens
from shared.kv.put import PutReport
from shared.kv.stream import Interrupted

RECEIVED = Received(FirstTokens((1,), (False,)), kv_bytes=8, wire_bytes=9)


def report(error: Exception | None) -> PutReport:
    """As a PUT that ended so is reported."""
    received = RECEIVED if error is None else None
    status, _ = answer_of(received, error)
    return PutReport(status, "shm", "kv-1", "req-1", received, error, 0.5)


def lines(error: Exception | None) -> list[tuple[str, str, object]]:
    """What is logged: event, level, and reason."""
    with structlog.testing.capture_logs() as logged:
        log_put(report(error))
    return [(line["event"], line["log_level"], line.get("reason")) for line in logged]


def test_success_is_silent() -> None:
    """The request's own line tells of it."""
    assert [] == lines(None)


@pytest.mark.parametrize(
    ("error", "reason"),
    [
        (ReservationGone("the reservation is gone"), "the reservation is gone"),
        (TransportFailed("no way"), "no way"),
        (NotAPut(HTTPStatus.REQUEST_TIMEOUT, "too slow"), "too slow"),
        (Interrupted(), "Interrupted"),
        (ConnectionResetError("the peer has left"), "the peer has left"),
    ],
)
def test_a_refusal_has_its_reason(error: Exception, reason: str) -> None:
    """One line, no traceback."""
    assert [("kv_put_ended", "info", reason)] == lines(error)


def test_strangers_are_not_logged() -> None:
    """Who connects and leaves, or asks for something else: it is counted."""
    with structlog.testing.capture_logs() as logged:
        for error in (
            ConnectionResetError("the peer has left"),
            NotAPut(HTTPStatus.NOT_FOUND, "nothing here"),
        ):
            log_put(replace(report(error), handoff_id=None))
    assert not logged


@pytest.mark.parametrize("error", [ZeroDivisionError("a bug"), EngineFault("broken")])
def test_a_bug_has_its_traceback(error: Exception) -> None:
    """It was answered 500 and counted, and nobody could tell why."""
    with structlog.testing.capture_logs() as logged:
        log_put(report(error))
    (line,) = logged
    assert ("kv_put_failed", "error", error) == (line["event"], line["log_level"], line["exc_info"])
    assert ("req-1", "kv-1", 500) == (line["request_id"], line["handoff_id"], line["status"])

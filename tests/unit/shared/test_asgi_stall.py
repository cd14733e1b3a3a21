"""When a connection counts as stalled, by a clock that the test turns."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import cast

import pytest

from shared.asgi.stall import StallWatch


class Clock:
    """Of an event loop: timers come due as the test goes on."""

    def __init__(self) -> None:
        self.now = 0.0
        self.due: list[tuple[float, SimpleNamespace, Callable[[], None]]] = []

    def call_later(self, delay: float, work: Callable[[], None]) -> SimpleNamespace:
        timer = SimpleNamespace(cancel=lambda: self.due.clear())
        self.due.append((self.now + delay, timer, work))
        return timer

    def pass_by(self, seconds: float) -> None:
        until = self.now + seconds
        while self.due and self.due[0][0] <= until:
            self.now, _, work = self.due.pop(0)
            work()
        self.now = until


class Connection:
    """`unsent` bytes wait in it."""

    def __init__(self, unsent: int) -> None:
        self.unsent = unsent
        self.aborted = False

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def abort(self) -> None:
        self.aborted = True


@pytest.fixture
def clock() -> Clock:
    """At zero."""
    return Clock()


def watch(connection: Connection, clock: Clock) -> StallWatch:
    """With a time-out of eight seconds, begun."""
    made = StallWatch(
        cast(asyncio.Transport, connection), cast(asyncio.AbstractEventLoop, clock), timeout_s=8.0
    )
    made.begin()
    return made


def test_nothing_taken_for_the_time_out_is_the_end(clock: Clock) -> None:
    """Not before."""
    connection = Connection(1000)
    watch(connection, clock)
    clock.pass_by(7.9)
    before = connection.aborted
    clock.pass_by(0.1)
    assert (False, True) == (before, connection.aborted)
    assert [] == clock.due


def test_slow_is_not_stalled(clock: Clock) -> None:
    """A byte every seven seconds, for an hour; an hour of silence ends it."""
    connection = Connection(1000)
    watch(connection, clock)
    for _ in range(3600 // 7):
        connection.unsent -= 1
        clock.pass_by(7.0)
    before = connection.aborted
    clock.pass_by(3600.0)
    assert (False, True) == (before, connection.aborted)


def test_what_was_taken_in_the_end_is_no_stall(clock: Clock) -> None:
    """No timer is left behind, and the next wait has all its time."""
    connection = Connection(1000)
    stall = watch(connection, clock)
    clock.pass_by(7.0)
    stall.end()
    stall.end()
    assert [] == clock.due
    stall.begin()
    clock.pass_by(7.9)
    assert not connection.aborted

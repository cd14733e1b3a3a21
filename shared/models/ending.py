"""A signal during a download: the hub's client waits for its threads, however much they still have to fetch."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Any

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
GRACE_S = 5.0

Handler = Callable[[int, FrameType | None], Any]


class Ending:
    """The end of the process, however long it takes to unwind, the end of the interpreter included.

    grace_s: from the first `begin` on. end: ends the process; called on a thread that nothing waits for.
    """

    def __init__(self, grace_s: float, end: Callable[..., object]) -> None:
        self._grace_s = grace_s
        self._end = end
        self._has_begun = False

    def begin(self, *given: object) -> bool:
        """For signal handlers; a second signal may come within. False if it has begun already. given: for `end`."""
        if self._has_begun:
            return False
        self._has_begun = True
        timer = threading.Timer(self._grace_s, self._end, given)
        timer.daemon = True
        timer.start()
        return True


@contextmanager
def ends_after_signal(grace_s: float = GRACE_S) -> Iterator[None]:
    """After one of SIGNALS that a handler takes, which is called as ever, the process ends within `grace_s`.

    With status 128 + the signal's number, from wherever it then is; even when this block was left meanwhile, for
    the end of the interpreter waits for the same threads. In another thread than the main one: nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    ending = Ending(grace_s, os._exit)

    def beginning(handler: Handler) -> Handler:
        def begin(number: int, frame: FrameType | None) -> None:
            ending.begin(128 + number)
            handler(number, frame)

        return begin

    before = {number: handler for number in SIGNALS if callable(handler := signal.getsignal(number))}
    try:
        for number, handler in before.items():
            signal.signal(number, beginning(handler))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

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


@contextmanager
def ends_after_signal(grace_s: float = GRACE_S) -> Iterator[None]:
    """After one of SIGNALS that a handler takes, which is called as ever, the process ends within `grace_s`.

    With status 128 + the signal's number, from wherever it then is; even when this block was left meanwhile, for
    the end of the interpreter waits for the same threads. In another thread than the main one: nothing.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    is_ending = False

    def ending(handler: Handler) -> Handler:
        def end(number: int, frame: FrameType | None) -> None:
            nonlocal is_ending
            if not is_ending:
                is_ending = True
                timer = threading.Timer(grace_s, os._exit, (128 + number,))
                timer.daemon = True
                timer.start()
            handler(number, frame)

        return end

    before = {number: handler for number in SIGNALS if callable(handler := signal.getsignal(number))}
    try:
        for number, handler in before.items():
            signal.signal(number, ending(handler))
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)

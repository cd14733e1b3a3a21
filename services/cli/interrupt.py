"""Signals before there are children to stop: what has begun is unwound, and soon.

Without a handler SIGTERM ends us half way, or, where we are process 1 of a container, does nothing at all.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from types import FrameType

from shared.models.ending import SIGNALS, Ending

_AT_LAST_S = 0.5


@contextmanager
def unwound_by_signals(grace_s: float, *, at_last: Callable[[], object]) -> Iterator[None]:
    """The first of SIGNALS raises KeyboardInterrupt within; one that was ignored, as by nohup, stays so.

    If unwinding takes longer than `grace_s`, the end of the interpreter included, the process ends with status 0
    where it is, after `at_last`: the hub's client and the interpreter wait for threads, however much they have to
    download yet. A later start goes on from there. In the main thread only.
    """
    ending = Ending(grace_s, partial(_end, at_last))

    def stop(_number: int, _frame: FrameType | None) -> None:
        if ending.begin():  # a second signal must not interrupt the cleaning up
            raise KeyboardInterrupt

    before = {number: handler for number in SIGNALS if (handler := signal.getsignal(number)) is not None}
    try:
        for number, handler in before.items():
            if handler is not signal.SIG_IGN:
                signal.signal(number, stop)
        yield
    except SystemExit as exc:
        # While an entry of the cache is made, `shared.models.store` has a handler of its own.
        if exc.code != 128 + signal.SIGTERM:
            raise
        raise KeyboardInterrupt from exc
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(at_last: Callable[[], object]) -> None:
    try:
        # Beside it: a terminal that takes nothing would hold it up for good.
        last = threading.Thread(target=at_last, daemon=True)
        last.start()
        last.join(_AT_LAST_S)
    finally:
        os._exit(0)

"""A child process stops when its supervisor is gone, however that ended: the kernel closes the pipe on stdin.

Chosen over PR_SET_PDEATHSIG, which needs code between fork and exec, follows a thread instead of a process, and
says nothing if the parent was gone before it was asked for.
"""

from __future__ import annotations

import os
import signal
import threading
import time


def stop_at_eof(fd: int, *, grace_s: float) -> threading.Thread:
    """Watch `fd` in a daemon thread; at its end ask this process to stop, and after `grace_s` end it."""
    thread = threading.Thread(target=_watch, args=(fd, grace_s), name="lifeline", daemon=True)
    thread.start()
    return thread


def _watch(fd: int, grace_s: float) -> None:
    while os.read(fd, 4096):
        pass
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(grace_s)
    os._exit(1)

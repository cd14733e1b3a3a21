"""Signals while `handoff up` prepares the model: exit status 0, whatever it was at, and nothing left running."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from services.cli.host import free_ports
from services.cli.interrupt import unwound_by_signals
from shared.models.ending import SIGNALS
from tests.unit.services.cli.fakes import alive

# `handoff up` whose model is prepared by the code that it is given.
_UP = """
import os, sys, time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
import services.cli.up as up
from services.cli.plan import Options
from shared.models.prepare import _run_conversion
from shared.models.store import make_entry
folder, port, body = Path(sys.argv[1]), int(sys.argv[2]), sys.argv[3]
def ready():
    print("preparing 0", flush=True)
def ensure_checkpoint(*_):
    exec(body, globals())
up.ensure_checkpoint = ensure_checkpoint
up._DOWNLOAD_GRACE_S = 0.5 if "ThreadPool" in body else 30.0
sys.exit(up.run_up(Options(port=port), dict(os.environ), show_logs=False))
"""
_DOWNLOAD = "ready()\nwhile True: time.sleep(60)"
# The converting process is a script that says who it is and never ends.
_CONVERT = """
script = folder / "python"
script.write_text("#!/bin/sh\\necho preparing $$\\nexec sleep 600\\n")
script.chmod(0o755)
sys.executable = str(script)
say = lambda line: print(line, flush=True)
make_entry(folder, "x/y", lambda path: _run_conversion(path, path, "float32", say), report=say)
"""
# As the hub's client does it: it waits for threads that do not know of the signal.
_THREADS = """
with ThreadPoolExecutor() as pool:
    pool.submit(time.sleep, 600)
    ready()
"""
# Nobody waits for them but the interpreter, at its end. So it is as well if the signal comes between two lines of
# `ThreadPoolExecutor.__exit__`.
_THREADS_LEFT = """
pool = ThreadPoolExecutor()
pool.submit(time.sleep, 600)
ready()
while True: time.sleep(60)
"""
_BODIES = {"download": _DOWNLOAD, "convert": _CONVERT, "threads": _THREADS, "threads left": _THREADS_LEFT}


@pytest.mark.parametrize("how", SIGNALS)
@pytest.mark.parametrize("body", _BODIES.values(), ids=_BODIES)
def test_a_signal_while_the_model_is_prepared_ends_it_with_status_0(
    how: signal.Signals, body: str, tmp_path: Path
) -> None:
    """SIGTERM once ended it with 143, and where it was process 1 with nothing at all."""
    with subprocess.Popen(
        [sys.executable, "-c", _UP, str(tmp_path), str(free_ports(1)[0]), body],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True,
    ) as process:  # fmt: skip
        assert process.stdout is not None
        child = next(int(line.split()[1]) for line in process.stdout if line.startswith("preparing "))
        process.send_signal(how)
        _, errors = process.communicate(timeout=60)
    assert (0, "") == (process.returncode, errors)
    assert not child or not alive(child)
    assert [] == list(tmp_path.glob("x/*"))


def test_handlers_are_put_back_and_what_was_ignored_stays_ignored() -> None:
    """As with nohup; the one after the first changes nothing, so that cleaning up is not interrupted."""
    ignored = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    before = [signal.getsignal(number) for number in SIGNALS]
    cleaned = False
    try:
        with (  # noqa: PT012
            pytest.raises(KeyboardInterrupt),
            unwound_by_signals(3600, at_last=lambda: None),
        ):
            os.kill(os.getpid(), signal.SIGHUP)
            try:
                signal.raise_signal(signal.SIGTERM)
            finally:
                signal.raise_signal(signal.SIGTERM)
                cleaned = True
        assert cleaned
        assert before == [signal.getsignal(number) for number in SIGNALS]
    finally:
        signal.signal(signal.SIGHUP, ignored)


def test_a_second_signal_may_come_within_the_first_one_s_handler(monkeypatch: pytest.MonkeyPatch) -> None:
    """It started the timer once more, and hung for good."""
    started = 0

    class Timer:
        daemon = False
        ident = None

        def __init__(self, *_: object) -> None: ...

        def start(self) -> None:
            nonlocal started
            started += 1
            signal.raise_signal(signal.SIGHUP)

    monkeypatch.setattr("services.cli.interrupt.threading.Timer", Timer)
    with pytest.raises(KeyboardInterrupt), unwound_by_signals(3600, at_last=lambda: None):
        signal.raise_signal(signal.SIGTERM)
    assert 1 == started


_AT_LAST = """
import os, signal, time
from services.cli.interrupt import unwound_by_signals
with unwound_by_signals(0.1, at_last=lambda: {at_last}):
    try:
        signal.raise_signal(signal.SIGTERM)
    finally:
        time.sleep(600)
"""


@pytest.mark.parametrize("at_last", ["time.sleep(600)", "1 / 0"])
def test_the_last_act_does_not_hold_up_the_end(at_last: str) -> None:
    """A terminal that takes nothing kept the process for good."""
    code = _AT_LAST.format(at_last=at_last)
    assert 0 == subprocess.run([sys.executable, "-c", code], timeout=60, capture_output=True).returncode


def test_another_exit_status_is_passed_on() -> None:
    """Only what SIGTERM makes of an unfinished cache entry is an interruption."""
    with pytest.raises(SystemExit, match="7"), unwound_by_signals(3600, at_last=lambda: None):
        raise SystemExit(7)

"""`handoff up` whose output nobody reads any more."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from pathlib import Path

import pytest
from rich.console import Console

from services.cli.lasting import lasting
from services.cli.progress import make_display
from tests.unit.services.cli.fakes import events, survivors

# `serve` of `handoff up` over one small child. `leave` is what the child does on SIGTERM.
_UP = """
import asyncio, os, sys
from pathlib import Path
from rich.console import Console
import services.cli.up as up
from services.cli.interrupt import unwound_by_signals
from services.cli.lasting import lasting
from services.cli.plan import Options
from services.cli.progress import make_display
from tests.unit.services.cli.fakes import RUN, fake, is_ready
async def ready(_, url):
    return await is_ready(url)
async def announce(*given):
    given[-1].say("serving")
up.answers, up._announce, up.worker_urls = ready, announce, lambda _: ""
console = Console(highlight=False, file=lasting(sys.stdout))
with unwound_by_signals(60, at_last=lambda: None), make_display(console) as display:
    asyncio.run(up.serve(Options(), [fake("router", RUN, Path(sys.argv[1]))], display, show_logs=False))
"""


def served(folder: Path, *before: str) -> subprocess.Popen[str]:
    """Started, and seen to serve."""
    process = subprocess.Popen(
        [*before, sys.executable, "-c", _UP, str(folder)], stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert process.stdout is not None
    assert any("serving" in line for line in process.stdout)
    return process


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_children_are_stopped_in_their_time_when_the_reader_has_left(
    tmp_path: Path, how: signal.Signals
) -> None:
    """`handoff up | tee log` and Ctrl-C, which ends `tee` first: the first line to it ended the stopping."""
    with served(tmp_path) as process:
        assert process.stdout is not None
        process.stdout.close()
        process.send_signal(how)
        assert process.stderr is not None
        errors = process.stderr.read()
        assert (0, "") == (process.wait(60), errors)
    assert ["started", "stopped"] == [what for _, what, _ in events(tmp_path)]
    assert [] == survivors(tmp_path)


def test_what_nohup_ignores_stays_ignored(tmp_path: Path) -> None:
    """The first SIGHUP, at the logout, stopped everything."""
    with served(tmp_path, "nohup") as process:
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(1)
        process.send_signal(signal.SIGTERM)
        process.communicate(timeout=60)
    assert ["started", "stopped"] == [what for _, what, _ in events(tmp_path)]


def test_lines_to_nobody_are_no_error(tmp_path: Path) -> None:
    """Not at the time, and not at the end of the file, where what is buffered is written."""
    reader, writer = os.pipe()
    with open(writer, "w") as file:
        display = make_display(Console(file=lasting(file)))
        os.close(reader)
        for number in range(3):
            display.update("router", f"state {number}")

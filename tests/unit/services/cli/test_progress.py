"""What is shown while things start."""

from __future__ import annotations

import io
import re

from rich.console import Console

from services.cli.progress import LiveDisplay, PlainDisplay, make_display


def _live(clock: list[float]) -> tuple[LiveDisplay, io.StringIO]:
    out = io.StringIO()
    console = Console(file=out, force_terminal=True, width=100, color_system=None)
    return LiveDisplay(console, clock=lambda: clock[0]), out


def test_plain_lines_tell_each_change_once() -> None:
    """A log is not filled with what has not changed."""
    lines: list[str] = []
    with PlainDisplay(lines.append) as display:
        display.update("decode-0", "starting")
        display.update("decode-0", "starting")
        display.update("decode-0", "starting", "loading weights")
        display.update("decode-0", "ready")
        display.say("done")
    assert ["decode-0: starting", "decode-0: starting, loading weights", "decode-0: ready", "done"] == lines


def test_the_table_shows_states_and_times() -> None:
    """A part's time stops when it is done."""
    clock = [0.0]
    display, out = _live(clock)
    with display:
        display.update("prefill-0", "starting")
        clock[0] = 2.5
        display.update("prefill-0", "ready")
        display.update("decode-0", "starting", "loading weights [not markup]")
        clock[0] = 9.0
    last = out.getvalue()
    assert re.search(r"prefill-0 +ready +2\.5 s", last)
    assert re.search(r"decode-0 +starting +6\.5 s +loading weights \[not markup\]", last)


def test_after_settling_changes_are_lines() -> None:
    """Nothing is redrawn while the server idles; a restart is still told."""
    display, out = _live([0.0])
    with display:
        display.update("decode-0", "ready")
        display.settle()
        before = len(out.getvalue())
        display.update("decode-0", "restarting", "decode-0 was killed by SIGKILL")
    assert "decode-0: restarting, decode-0 was killed by SIGKILL\n" == out.getvalue()[before:]


def test_the_display_fits_the_output() -> None:
    """Control codes only on a terminal."""
    assert isinstance(make_display(Console(file=io.StringIO(), force_terminal=True)), LiveDisplay)
    out = io.StringIO()
    with make_display(Console(file=out)) as display:
        display.update("model", "ready", "/models/[tiny]")
    assert "model: ready, /models/[tiny]\n" == out.getvalue()

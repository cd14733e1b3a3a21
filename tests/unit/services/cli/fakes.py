"""Tiny processes to supervise, and ways to wait for them that need no sleep."""

from __future__ import annotations

import asyncio
import os
import sys
from pathlib import Path
from typing import Self

from services.cli.plan import ChildSpec

# Says that it is there, then does what the test asked for. `events` is one file that all children append to.
_PROLOGUE = """
import os, signal, sys, time
name, folder = sys.argv[1:]
def event(what):
    with open(f"{folder}/events", "a") as events:
        events.write(f"{name} {what} {os.getpid()}\\n")
def leave(*_):
    event("stopped")
    sys.exit(0)
signal.signal(signal.SIGTERM, leave)
event("started")
def ready():
    open(f"{folder}/{name}.ready", "w").close()
"""
RUN = "ready()\nwhile True: signal.pause()"
STUBBORN = "signal.signal(signal.SIGTERM, lambda *_: event('refused'))\nready()\nwhile True: signal.pause()"
FAIL_AT_START = "print('loading')\nprint('no such model')\nsys.exit(3)"


def fake(name: str, body: str, folder: Path) -> ChildSpec:
    """A child that runs `body`; it is ready when the file its `ready_url` names exists."""
    argv = (sys.executable, "-S", "-c", _PROLOGUE + body, name, str(folder))
    return ChildSpec("decode", name, argv, dict(os.environ), ready_url=str(folder / f"{name}.ready"))


async def is_ready(url: str) -> bool:
    """Readiness of a fake."""
    return Path(url).exists()


def events(folder: Path) -> list[tuple[str, str, int]]:
    """Name, event and process id of everything the children said so far, in order."""
    path = folder / "events"
    lines = path.read_text().splitlines() if path.exists() else []
    return [(name, what, int(pid)) for name, what, pid in (line.split() for line in lines)]


def alive(pid: int) -> bool:
    """Whether the process exists."""
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    return True


def survivors(folder: Path) -> list[int]:
    """Processes that were started and still exist."""
    return [pid for _, what, pid in events(folder) if what == "started" and alive(pid)]


class Recorder:
    """A display that keeps what it is told, and lets a test wait for it."""

    def __init__(self) -> None:
        self.updates: list[tuple[str, str]] = []
        self.lines: list[str] = []
        self._changed = asyncio.Event()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def update(self, name: str, state: str, detail: str = "") -> None:
        """Keep the change, repetitions dropped."""
        if (name, state) not in self.updates[-1:]:
            self.updates.append((name, state))
            self._changed.set()

    def say(self, line: str) -> None:
        """Keep the line."""
        self.lines.append(line)
        self._changed.set()

    def settle(self) -> None:
        """Nothing to settle."""

    async def seen(self, name: str, state: str, times: int = 1) -> None:
        """Return once `name` was `times` times in `state`."""
        while self.updates.count((name, state)) < times:
            self._changed.clear()
            await self._changed.wait()

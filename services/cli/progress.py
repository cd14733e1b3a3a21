"""What `handoff up` shows while it starts: a live table on a terminal, plain lines anywhere else."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from types import TracebackType
from typing import Protocol, Self

from rich.console import Console
from rich.live import Live
from rich.spinner import Spinner
from rich.table import Table
from rich.text import Text

DONE = frozenset({"ready", "stopped", "failed"})
_STYLES = {"ready": "green", "failed": "bold red", "restarting": "yellow", "stopped": "dim"}


class Display(Protocol):
    """Shows the state of each part by name, and lines that stay."""

    def __enter__(self) -> Self: ...
    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def update(self, name: str, state: str, detail: str = "") -> None:
        """The part `name` is now in `state`; `detail` says what it does, in one line."""

    def say(self, line: str) -> None:
        """Print a line that stays."""

    def settle(self) -> None:
        """All parts are up: changes from here on are lines, and nothing is redrawn."""


@dataclass
class _Row:
    state: str
    detail: str
    since_s: float
    took_s: float | None = None


class PlainDisplay:
    """A line for each change: for logs, pipes and CI."""

    def __init__(self, write: Callable[[str], None]) -> None:
        self._write = write
        self._last: dict[str, tuple[str, str]] = {}

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        pass

    def update(self, name: str, state: str, detail: str = "") -> None:
        """Write the change, if it is one."""
        if self._last.get(name) != (state, detail):
            self._last[name] = (state, detail)
            self._write(f"{name}: {state}" + (f", {detail}" if detail else ""))

    def say(self, line: str) -> None:
        """Write `line`."""
        self._write(line)

    def settle(self) -> None:
        """Nothing is ever redrawn here."""


class LiveDisplay:
    """A table that is redrawn in place, until it settles; elapsed seconds run while a part is not done."""

    def __init__(self, console: Console, clock: Callable[[], float] = time.monotonic) -> None:
        self._console = console
        self._clock = clock
        self._settled = False
        self._rows: dict[str, _Row] = {}
        # Its spinners are kept: a new one for every frame would never turn.
        self._spinners: dict[str, Spinner] = {}
        self._live = Live(get_renderable=self._table, console=console, refresh_per_second=8, transient=False)

    def __enter__(self) -> Self:
        self._live.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, value: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._live.stop()

    def update(self, name: str, state: str, detail: str = "") -> None:
        """Show the change with the next frame."""
        if self._settled:
            self.say(f"{name}: {state}" + (f", {detail}" if detail else ""))
            return
        row = self._rows.get(name)
        if row is None or (row.state in DONE and state not in DONE):
            row = self._rows[name] = _Row(state, detail, self._clock())
        row.state, row.detail = state, detail
        row.took_s = self._clock() - row.since_s if state in DONE else None

    def say(self, line: str) -> None:
        """Print `line` above the table."""
        self._console.print(Text(line), soft_wrap=True)

    def settle(self) -> None:
        """Leave the table as it is now; an idle server must not spend time on drawing."""
        self._settled = True
        self._live.stop()

    def _table(self) -> Table:
        table = Table.grid(padding=(0, 2))
        for name, row in list(self._rows.items()):
            elapsed = self._clock() - row.since_s if row.took_s is None else row.took_s
            mark = Text("●", _STYLES.get(row.state, "")) if row.state in DONE else self._spinner(name)
            state = Text(row.state, _STYLES.get(row.state, "cyan"))
            table.add_row(mark, Text(name), state, Text(f"{elapsed:.1f} s", "dim"), Text(row.detail, "dim"))
        return table

    def _spinner(self, name: str) -> Spinner:
        return self._spinners.setdefault(name, Spinner("dots"))


def make_display(console: Console) -> Display:
    """The display that fits where `console` writes."""
    if console.is_terminal:
        return LiveDisplay(console)
    return PlainDisplay(lambda line: console.print(Text(line), soft_wrap=True))

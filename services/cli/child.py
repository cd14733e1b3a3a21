"""One child process: started away from the terminal, tied to our life by a pipe, its output kept in a file."""

from __future__ import annotations

import asyncio
import os
import signal
from asyncio.subprocess import PIPE, STDOUT, Process
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from services.cli.plan import ChildSpec

Echo = Callable[[str, str], None]

_TAIL_BYTES = 16 * 1024


class Child:
    """A process made from a spec, as often as it is started.

    lifeline_fd: read end of a pipe whose write end only the supervisor holds; the child's stdin.
    echo: gets name and line of all output as well, if given.
    """

    def __init__(self, spec: ChildSpec, log: Path, *, lifeline_fd: int, echo: Echo | None = None) -> None:
        self.spec = spec
        self.log = log
        self._lifeline_fd = lifeline_fd
        self._echo = echo
        self._process: Process | None = None
        self._pump: asyncio.Task[None] | None = None

    @property
    def running(self) -> bool:
        """Whether it was started and has not ended."""
        return self._process is not None and self._process.returncode is None

    async def start(self) -> None:
        """Start it in a session of its own, so that the terminal's Ctrl-C reaches only us."""
        assert not self.running
        with self.log.open("ab") as log:
            self._process = await asyncio.create_subprocess_exec(
                *self.spec.argv,
                stdin=self._lifeline_fd,
                stdout=PIPE if self._echo else log,
                stderr=STDOUT,
                env=dict(self.spec.environ),
                start_new_session=True,
            )
        if self._echo is not None:
            self._pump = asyncio.create_task(self._copy_output(self._process, self._echo))

    async def wait(self) -> int:
        """Its exit status, once it has ended; negative: the signal that ended it."""
        assert self._process is not None
        code = await self._process.wait()
        if self._pump is not None:
            await self._pump
        return code

    def terminate(self) -> None:
        """Ask it to finish what it does and leave."""
        if self.running and self._process is not None:
            self._process.terminate()

    def kill(self) -> None:
        """End it and everything it started."""
        if self.running and self._process is not None:
            with suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)

    def tail(self, num_lines: int) -> list[str]:
        """The last lines of its output."""
        if not self.log.exists():
            return []
        with self.log.open("rb") as log:
            size = log.seek(0, os.SEEK_END)
            log.seek(max(0, size - _TAIL_BYTES))
            return log.read().decode(errors="replace").splitlines()[-num_lines:]

    async def _copy_output(self, process: Process, echo: Echo) -> None:
        assert process.stdout is not None
        rest = b""
        with self.log.open("ab", buffering=0) as log:
            while data := await process.stdout.read(65536):
                log.write(data)
                *lines, rest = (rest + data).split(b"\n")
                for line in lines:
                    echo(self.spec.name, line.decode(errors="replace"))
        if rest:
            echo(self.spec.name, rest.decode(errors="replace"))

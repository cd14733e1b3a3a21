"""Output that outlives its reader: `handoff up | tee log` must still stop its processes when `tee` is gone."""

from __future__ import annotations

import os
from typing import IO, Any, cast


class _Lasting:
    """A text file; when it cannot be written to any more, what it is given goes nowhere, and that is no error."""

    def __init__(self, file: IO[str]) -> None:
        self._file = file

    def __getattr__(self, name: str) -> Any:
        return getattr(self._file, name)

    def write(self, text: str) -> int:
        """All of it, or nowhere."""
        try:
            return self._file.write(text)
        except OSError:
            self._let_go()
            return len(text)

    def flush(self) -> None:
        """As far as there is somebody to read it."""
        try:
            self._file.flush()
        except OSError:
            self._let_go()

    def _let_go(self) -> None:
        """What is buffered goes there too, at the latest at the end of the process, which would fail otherwise."""
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, self._file.fileno())
        os.close(nowhere)


def lasting(file: IO[str]) -> IO[str]:
    """`file`, for one whose reader may leave."""
    return cast("IO[str]", _Lasting(file))

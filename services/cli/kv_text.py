"""How `handoff kv` writes names and sizes, and where it writes them."""

from __future__ import annotations

import sys
from pathlib import Path

from rich.console import Console

MB = 1024 * 1024
_FILE_COLUMNS = 140


def console() -> Console:
    """Plain text as it is: no markup, no emoji, no wrapping at 80 columns in files and pipes."""
    width = None if sys.stdout.isatty() else _FILE_COLUMNS
    return Console(width=width, markup=False, emoji=False, highlight=False)


def one_line(path: Path) -> str:
    """A file's name that cannot break a line or the terminal."""
    text = str(path)
    return text if text.isprintable() else ascii(text)


def megabytes(num_bytes: int) -> str:
    """1 MB = 2**20 bytes; half of the last digit is rounded up, in integers, so that no size is rounded to even."""
    hundredths = (num_bytes * 100 + MB // 2) // MB
    return f"{hundredths // 100:,}.{hundredths % 100:02d} MB"

"""Log lines of our processes, which are JSON, as a person reads them. Any other line stays as it is."""

from __future__ import annotations

import json
from typing import Any

_ELSEWHERE = frozenset({"event", "level", "logger", "service", "timestamp", "exception"})


def readable(line: str) -> str:
    """Event and facts on one line, a stack trace below."""
    entry = _parse(line)
    if entry is None:
        return line
    words = [] if entry.get("level") in (None, "info") else [f"{entry['level']}:"]
    words += [
        _printable(entry["event"]),
        *(f"{_printable(key)}={_printable(value)}" for key, value in entry.items() if key not in _ELSEWHERE),
    ]
    return "\n".join(filter(None, [" ".join(words), entry.get("exception")]))


def summary(line: str) -> str:
    """In a few words what the process does: the step it names, else the event."""
    entry = _parse(line)
    return line if entry is None else str(entry.get("step") or entry["event"]).replace("_", " ")


def _printable(value: Any) -> str:
    """A client may have written it: line ends and terminal escapes are shown, not obeyed."""
    return "".join(c if c.isprintable() else ascii(c)[1:-1] for c in str(value))


def _parse(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and "event" in entry else None

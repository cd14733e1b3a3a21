"""Log lines of our processes, which are JSON, as a person reads them. Any other line stays as it is."""

from __future__ import annotations

import json
from typing import Any

from shared.asgi.text import printable

_ELSEWHERE = frozenset({"event", "level", "logger", "service", "timestamp", "exception"})


def readable(line: str) -> str:
    """Event and facts on one line, a stack trace below."""
    entry = _parse(line)
    if entry is None:
        return line
    words = [] if entry.get("level") in (None, "info") else [f"{entry['level']}:"]
    words += [
        printable(str(entry["event"])),
        *(
            f"{printable(key)}={printable(str(value))}"
            for key, value in entry.items()
            if key not in _ELSEWHERE
        ),
    ]
    trace = [printable(part) for part in str(entry.get("exception") or "").split("\n")]
    return "\n".join(filter(None, [" ".join(words), *trace]))


def summary(line: str) -> str:
    """In a few words what the process does: the step it names, else the event."""
    entry = _parse(line)
    return line if entry is None else printable(str(entry.get("step") or entry["event"])).replace("_", " ")


def _parse(line: str) -> dict[str, Any] | None:
    if not line.startswith("{"):
        return None
    try:
        entry = json.loads(line)
    except ValueError:
        return None
    return entry if isinstance(entry, dict) and "event" in entry else None

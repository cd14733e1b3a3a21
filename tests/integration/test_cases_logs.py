"""Log lines for people, of requests that try to write log lines of their own."""

from __future__ import annotations

import json

import pytest

from services.cli.log_lines import readable


@pytest.mark.parametrize("end", ["\n", "\r", "\u2028", "\u0085", "\x1b[2K\x1b[1G", "\0"])
def test_a_client_cannot_forge_a_line(end: str) -> None:
    """Paths and field names come from clients: what they write stays on the line, and moves no cursor."""
    path = f"/nope{end}completion ending=ok"
    shown = readable(json.dumps({"event": "request", "level": "info", "path": path, f"x{end}": 1}))
    assert shown.isprintable()
    assert 1 == len(shown.splitlines())
    assert "completion ending=ok" in shown


def test_words_of_any_language_stay_as_they_are() -> None:
    """Only what cannot be seen is spelled out."""
    assert "request path=/名前 é 😀" == readable(json.dumps({"event": "request", "path": "/名前 é 😀"}))

"""Log lines for people."""

from __future__ import annotations

import pytest

from services.cli.log_lines import readable, summary

STEP = (
    '{"step":"loading tiny","event":"model","logger":"x","level":"info","timestamp":"t","service":"decode"}'
)
FAULT = '{"event":"engine_died","level":"error","batch":3,"exception":"Traceback\\nValueError: x"}'


def test_an_entry_is_its_event_and_facts() -> None:
    """Where and when it was logged is left to the file."""
    assert "model step=loading tiny" == readable(STEP)


def test_a_fault_keeps_its_level_and_trace() -> None:
    """The lines shown for a dead child must say why it died."""
    assert "error: engine_died batch=3\nTraceback\nValueError: x" == readable(FAULT)


def test_the_summary_is_what_is_being_done() -> None:
    """A step in words if there is one."""
    assert ["loading tiny", "engine died"] == [summary(line) for line in (STEP, FAULT)]


def test_what_a_client_wrote_is_not_obeyed_by_the_terminal() -> None:
    """Neither in facts nor in a trace or a step."""
    fault = '{"event":"e","path":"\\u001b[2J","exception":"T\\nV: \\u001b[2J"}'
    assert "e path=\\x1b[2J\nT\nV: \\x1b[2J" == readable(fault)
    assert "\\x1b[2J" == summary('{"event":"model","step":"\\u001b[2J"}')


@pytest.mark.parametrize("line", ["", "Killed", "{not json", '{"no": "entry"}', "[1]", '{"event": "x"'])
def test_other_lines_stay(line: str) -> None:
    """Libraries and the kernel write what they like."""
    assert [line, line] == [readable(line), summary(line)]

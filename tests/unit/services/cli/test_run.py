"""Settings are checked once, against every name that any process knows."""

from __future__ import annotations

import pytest

from services.cli.run import check_names, known_names, run_process
from shared.settings import BAD_SETTINGS, BadSettings


def test_names_of_other_processes_are_no_mistake() -> None:
    """One environment may serve all processes of a host."""
    environ = {"HANDOFF_PREFILL_URLS": "x", "HANDOFF_KV_PORT": "1", "HANDOFF_CHUNK_SIZE": "1", "PATH": "x"}
    assert known_names() == check_names(environ)


def test_an_unknown_name_is_refused_with_the_nearest_one() -> None:
    """A misspelt setting must not be ignored in silence."""
    with pytest.raises(
        BadSettings, match="unknown setting HANDOFF_MAX_QUEUE, did you mean HANDOFF_MAX_QUEUED"
    ):
        check_names({"HANDOFF_MAX_QUEUE": "1"})


def test_bad_settings_are_one_line_and_status_2(capsys: pytest.CaptureFixture[str]) -> None:
    """No stack trace: which name is wrong, and nothing of its value."""
    status = run_process("decode", {"HANDOFF_SECRET": "s" * 32, "HANDOFF_PORT": "hunter2"})
    (line,) = capsys.readouterr().err.splitlines()
    assert BAD_SETTINGS == status
    assert line.startswith("handoff decode: HANDOFF_PORT: ")
    assert "hunter2" not in line

"""The command line as its users meet it."""

from __future__ import annotations

import subprocess
import sys

import pytest
from typer.testing import CliRunner

from services.cli.main import app

HEAVY = ("torch", "transformers", "fastapi", "uvicorn", "httpx", "pydantic_settings")


def _run(*arguments: str, env: dict[str, str] | None = None) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments), env=env, prog_name="handoff")
    return result.exit_code, result.output


def test_help_lists_every_subcommand() -> None:
    """One screen says what there is."""
    status, output = _run("--help")
    assert 0 == status
    for command in ("up", "router", "prefill", "decode", "model", "bench", "settings", "health"):
        assert f" {command} " in output


def test_the_command_loads_nothing_heavy_before_it_must() -> None:
    """`handoff --help` stays quick: no web server, no torch."""
    code = f"import sys, services.cli.main; print([m for m in {HEAVY} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "[]\n" == done.stdout


@pytest.mark.parametrize("command", ["model", "bench"])
def test_grouped_commands_explain_themselves(command: str) -> None:
    """`--help` behind a group is answered by the group."""
    done = subprocess.run(
        [sys.executable, "-m", "services.cli.main", command, "--help"],
        capture_output=True,
        text=True,
        check=False,
    )
    assert 0 == done.returncode, done.stderr
    assert f"handoff {command}" in done.stdout


def test_settings_prints_every_name_as_markdown() -> None:
    """The README's table is this output."""
    status, output = _run("settings", "--markdown")
    assert 0 == status
    assert output.startswith("| setting | processes |")
    assert "`HANDOFF_PREFILL_URLS`" in output
    assert "`HANDOFF_KV_POOL_BYTES`" in output


def test_an_unknown_setting_stops_up_before_anything_starts() -> None:
    """Exit status 2 and one line."""
    status, output = _run("up", env={"HANDOFF_CHUNKSIZE": "1"})
    assert 2 == status
    assert "unknown setting HANDOFF_CHUNKSIZE, did you mean HANDOFF_CHUNK_SIZE?" in output


def test_a_key_can_be_given_as_an_option(monkeypatch: pytest.MonkeyPatch) -> None:
    """It goes before the variable, and is checked before anything starts."""
    monkeypatch.setenv("HANDOFF_API_KEY", "a-key-that-would-do")
    result = CliRunner().invoke(app, ["up", "--api-key", "short"])

    assert 2 == result.exit_code
    assert "HANDOFF_API_KEY: a key must be at least" in result.output

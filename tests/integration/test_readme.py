"""Every command of the README and the docs is run, or, where it needs an engine that is not here, checked."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from itertools import pairwise
from pathlib import Path

import pytest

from tests.support.cluster import Cluster

ROOT = Path(__file__).parents[2]
DOCS = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
PORT = ":8000"


def blocks(language: str) -> list[str]:
    """Fenced code blocks of one language in all pages."""
    found: list[str] = []
    for page in DOCS:
        found += re.findall(rf"```{language}\n(.*?)```", page.read_text(), re.DOTALL)
    return found


def commands() -> list[str]:
    """One entry per shell command; lines that end in a backslash go on."""
    lines = [line for block in blocks("bash") for line in block.replace("\\\n", " ").splitlines()]
    return [line.strip() for line in lines if line.strip() and not line.startswith("#")]


def named(first: str) -> list[str]:
    """Commands that begin with a word."""
    return [command for command in commands() if shlex.split(command)[0] == first]


def test_every_command_is_of_a_kind_that_is_checked_here() -> None:
    """A new kind of command in the docs needs a test first."""
    assert {shlex.split(command)[0] for command in commands()} == {"make", "curl", "handoff", "docker"}


@pytest.mark.parametrize("command", named("curl"))
def test_curl_commands_answer(pd: Cluster, command: str) -> None:
    """Verbatim, but for the port: 200 and every stage in the headers."""
    done = subprocess.run(
        ["bash", "-c", command.replace(PORT, f":{pd.router.port}")],
        capture_output=True,
        text=True,
        check=True,
    )

    assert done.stdout.startswith("HTTP/1.1 200 OK")
    for stage in ("route", "reserve", "queue", "prefill", "transfer", "decode_queue", "decode", "total"):
        assert f"{stage};dur=" in done.stdout


@pytest.mark.parametrize("program", blocks("python"))
def test_python_examples_run(pd: Cluster, program: str) -> None:
    """Verbatim, but for the port, in a process of their own."""
    done = subprocess.run(
        [sys.executable, "-c", program.replace(PORT, f":{pd.router.port}")],
        capture_output=True,
        text=True,
        check=False,
    )

    assert (0, "") == (done.returncode, done.stderr)
    assert "total;dur=" in done.stdout


def run_handoff(command: str) -> None:
    """It exits with 0, complains of nothing, and says something."""
    arguments = shlex.split(command)[1:]
    done = subprocess.run(
        [sys.executable, "-m", "services.cli.main", *arguments], capture_output=True, text=True, check=False
    )

    assert (0, "") == (done.returncode, done.stderr)
    assert done.stdout


MODEL_COMMANDS = [command for command in named("handoff") if command.startswith("handoff model ")]


@pytest.mark.parametrize("command", [c for c in named("handoff") if c not in MODEL_COMMANDS])
def test_handoff_commands_run(command: str) -> None:
    """Verbatim."""
    run_handoff(command)


@pytest.mark.real
@pytest.mark.timeout(900)
def test_handoff_model_commands_run_in_their_order() -> None:
    """The default model is there, or is fetched, and then it is listed."""
    assert ["handoff model pull", "handoff model list"] == MODEL_COMMANDS
    pull = [sys.executable, "-m", "services.cli.main", *shlex.split(MODEL_COMMANDS[0])[1:]]
    subprocess.run(pull, check=True)
    run_handoff(MODEL_COMMANDS[1])


@pytest.mark.parametrize("command", named("make"))
def test_make_targets_exist(command: str) -> None:
    """make knows what the docs name."""
    subprocess.run(["make", "-n", *shlex.split(command)[1:]], cwd=ROOT, capture_output=True, check=True)


@pytest.mark.parametrize("command", named("docker"))
def test_compose_commands_name_files_that_exist(command: str) -> None:
    """tests/unit/test_compose.py checks what is in them."""
    words = shlex.split(command)

    assert words[:2] == ["docker", "compose"]
    assert words[-1] == "up"
    for flag, value in pairwise(words):
        if flag == "-f":
            assert (ROOT / value).is_file()


def test_the_readmes_settings_table_is_the_codes() -> None:
    """The table between the marks is what `handoff settings --markdown` prints."""
    text = (ROOT / "README.md").read_text()
    table = text.split("<!-- settings -->")[1].split("<!-- /settings -->")[0]

    printed = subprocess.run(
        [sys.executable, "-m", "services.cli.main", "settings", "--markdown"],
        capture_output=True,
        text=True,
        check=True,
    )
    assert printed.stdout.strip() == table.strip()


def test_links_between_pages_lead_somewhere() -> None:
    """Relative links point to files of the repository."""
    for page in DOCS:
        for target in re.findall(r"\]\(([^)#]+)[^)]*\)", page.read_text()):
            if "://" not in target:
                assert (page.parent / target).exists(), f"{page.name}: {target}"

"""Project metadata, lock files, image and make targets agree with each other."""

from __future__ import annotations

import json
import os
import re
import sys
import tomllib
from importlib import metadata
from pathlib import Path
from typing import Any

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

from services.cli.main import app

ROOT = Path(__file__).parents[2]
LOCKS = ["requirements.lock", "requirements-gpu.lock"]


def _project() -> dict[str, Any]:
    project: dict[str, Any] = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    return project


def _pins(lock: str) -> dict[str, str]:
    lines = [line for line in (ROOT / lock).read_text().splitlines() if line and not line.startswith("#")]
    pins = [re.split("={2,3}", line, maxsplit=1) for line in lines]
    return {canonicalize_name(name): version for name, version in pins}


def _instructions(name: str) -> list[str]:
    """What follows each `name` of the Dockerfile's last stage."""
    stage = (ROOT / "Dockerfile").read_text().rpartition("\nFROM ")[2]
    return re.findall(rf"^{name} (.+)$", stage, flags=re.MULTILINE)


@pytest.mark.parametrize("lock", LOCKS)
def test_the_lock_pins_everything_that_is_asked_for(lock: str) -> None:
    """Every dependency has one exact version in the lock, within the range of pyproject.toml."""
    project, pins = _project(), _pins(lock)
    wanted = [
        *project["dependencies"],
        *(r for extra in project["optional-dependencies"].values() for r in extra),
    ]
    for requirement in map(Requirement, wanted):
        if requirement.name != project["name"]:
            version = Version(pins[canonicalize_name(requirement.name)])
            assert requirement.specifier.contains(version.public), requirement


def test_both_locks_are_one_set_of_versions() -> None:
    """They differ in the build of torch and what that build needs, in nothing else."""
    cpu, gpu = (_pins(lock) for lock in LOCKS)
    differing = {name for name in cpu.keys() | gpu.keys() if cpu.get(name) != gpu.get(name)}
    assert ("torch", cpu["torch"]) == ("torch", f"{gpu['torch']}+cpu")
    assert set() == {n for n in differing if not n.startswith(("torch", "nvidia-", "cuda-", "triton"))}


def test_the_cpu_lock_can_never_give_a_cuda_build() -> None:
    """It names the local version, which only CPU builds carry, and no CUDA library."""
    pins = _pins("requirements.lock")
    assert pins["torch"].endswith("+cpu")
    assert [] == [name for name in pins if name.startswith(("nvidia-", "cuda-", "triton"))]


def test_the_installed_environment_is_the_locked_one() -> None:
    """What these tests run on is what the lock says, where the environment was made from it."""
    if not (Path(sys.prefix) / f".made-from-{LOCKS[0]}").exists():
        pytest.skip("this environment was not made by `make env` from the CPU lock")
    wrong = {
        name: (version, metadata.version(name))
        for name, version in _pins(LOCKS[0]).items()
        if metadata.version(name) != version
    }
    assert {} == wrong


def test_the_image_runs_our_command_as_nobody_special() -> None:
    """Exec form, so that signals reach the process; an unprivileged user; the entry point of the package."""
    (entry_point,) = _instructions("ENTRYPOINT")
    (user,) = _instructions("USER")
    assert list(_project()["scripts"]) == json.loads(entry_point)
    assert user not in {"root", "0"}


def test_what_the_image_copies_exists_and_is_in_its_context() -> None:
    """No COPY names a path that is missing or that .dockerignore keeps out."""
    copied = re.findall(r"^COPY (?!--from)(.+) \S+$", (ROOT / "Dockerfile").read_text(), flags=re.MULTILINE)
    allowed = {line[1:] for line in (ROOT / ".dockerignore").read_text().splitlines() if line.startswith("!")}
    for path in " ".join(copied).split():
        assert (ROOT / path).exists(), path
        assert path in allowed


def test_every_subcommand_that_files_name_exists() -> None:
    """The Makefile and the compose files call subcommands that there are."""
    commands = {
        command.name or (command.callback.__name__ if command.callback else None)
        for command in app.registered_commands
    }
    named = re.findall(r"/handoff (\w+)", (ROOT / "Makefile").read_text())
    assert {
        "up",
        "router",
        "prefill",
        "decode",
        "model",
        "bench",
        "kv",
        "doctor",
        "settings",
        "health",
        *named,
    } == commands


def test_ci_runs_the_same_commands_as_people() -> None:
    """.ci/run is executable, stops at the first failure and calls make."""
    script = ROOT / ".ci" / "run"
    assert os.access(script, os.X_OK)
    assert "set -euo pipefail" in script.read_text()
    assert ["check", "test"] == re.findall(r"^make (\w+)", script.read_text(), flags=re.MULTILINE)

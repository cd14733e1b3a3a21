"""`handoff model`: paths on stdout, everything else on stderr, one clear line for what fails."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from services.cli.model import model_app
from tests.support.tiny_model import build_tiny_model


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty cache that the command is told of, and no default model."""
    monkeypatch.setenv("HANDOFF_CACHE_DIR", str(tmp_path / "cache"))
    monkeypatch.delenv("HANDOFF_MODEL", raising=False)
    return tmp_path / "cache"


def _run(*arguments: str) -> Result:
    return CliRunner().invoke(model_app, list(arguments))


@pytest.mark.usefixtures("cache")
def test_a_ready_folder_is_its_own_path(tmp_path: Path) -> None:
    """pull and path print the folder itself if it can be served as it is."""
    folder = build_tiny_model(tmp_path / "tiny")
    for command in ("pull", "path"):
        result = _run(command, str(folder))
        assert (0, f"{folder}\n") == (result.exit_code, result.stdout)


def test_pull_makes_what_path_and_list_then_find(tmp_path: Path, cache: Path) -> None:
    """Before a pull, path fails and says what helps; after it both name the same folder."""
    folder = str(build_tiny_model(tmp_path / "tiny"))
    before = _run("path", folder, "--dtype", "bfloat16")
    assert (1, "") == (before.exit_code, before.stdout)
    assert f"handoff: {folder} is not here in bfloat16; `handoff model pull` gets it\n" == before.stderr
    pulled = _run("pull", folder, "--dtype", "bfloat16")
    assert pulled.stdout == _run("path", folder, "--dtype", "bfloat16").stdout
    assert "converting tiny to bfloat16, once" in pulled.stderr
    name, kind, _, path = _run("list").stdout.strip().split("\t")
    assert ("tiny", "bfloat16", pulled.stdout.strip()) == (name, kind, path)
    assert Path(path).parent == cache / "checkpoints"


@pytest.mark.usefixtures("cache")
@pytest.mark.parametrize("command", ["pull", "path"])
def test_what_is_no_model_is_one_line_and_status_1(command: str) -> None:
    """No traceback for a wrong name."""
    result = _run(command, "./nowhere")
    assert (1, "") == (result.exit_code, result.stdout)
    assert (
        "handoff: ./nowhere is neither a folder, nor a .gguf file, nor the id of a hub model\n"
        == result.stderr
    )


def test_an_empty_cache_is_said_so(cache: Path) -> None:
    """list succeeds with nothing on stdout."""
    result = _run("list")
    assert (0, "", f"no models in {cache}\n") == (result.exit_code, result.stdout, result.stderr)

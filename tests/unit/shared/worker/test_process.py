"""A worker that cannot have its model says so before it loads what it would run it with."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

_RUN = """
import os, sys
from services.cli.run import run_process
code = run_process(sys.argv[1], os.environ)
print(code, "torch" in sys.modules)
"""


@pytest.mark.parametrize("role", ["prefill", "decode", "router"])
@pytest.mark.parametrize("model", ["nobody/nothing", "/no/such/folder", "half"])
def test_a_model_that_is_not_here_is_told_without_torch(role: str, model: str, tmp_path: Path) -> None:
    """One line and status 1; loading torch first took half a minute on a busy machine."""
    (tmp_path / "half").mkdir()
    environ = {
        **os.environ,
        "HF_HUB_OFFLINE": "1",
        "HANDOFF_CACHE_DIR": str(tmp_path / "cache"),
        "HANDOFF_SECRET": "a-secret-for-the-tests",
        "HANDOFF_MODEL": str(tmp_path / model) if model == "half" else model,
        "HANDOFF_LOG_FORMAT": "json",
    }
    done = subprocess.run(
        [sys.executable, "-c", _RUN, role],
        env=environ,
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    lines = [json.loads(line) for line in done.stderr.splitlines()]
    assert "1 False" == done.stdout.strip()
    assert ["settings", "no_model"] == [line["event"] for line in lines]
    assert Path(model).name in lines[1]["reason"]

"""`handoff bench kv-quant` on a tiny model: what it says, and that what it says is true."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli.bench import bench_app
from tests.support.tiny_model import build_tiny_model


@pytest.mark.slow
def test_formats_are_measured(tmp_path: Path) -> None:
    """Both formats save about three quarters of float32 KV, and are off by little; int8 by less."""
    path = tmp_path / "result.json"
    model = build_tiny_model(tmp_path / "model")
    sizes = ["--threads", "1", "--prompt-tokens", "70", "--output-tokens", "4"]
    command = ["kv-quant", "--model", str(model), *sizes, "--json", str(path)]
    run = CliRunner().invoke(bench_app, command)
    assert 0 == run.exit_code, run.output
    formats = json.loads(path.read_text())["formats"]
    assert {"int8", "fp8"} == set(formats)
    for total in formats.values():
        assert 4 == total["num_answers"] == len(total["prompts"])
        assert total["num_tokens"] == sum(prompt["num_tokens"] for prompt in total["prompts"])
        assert 0 < total["num_tokens"] <= 4 * 4
        assert 0.5 < total["saved_share"] < 0.75
        assert total["equal_tokens"] > 0.8 * total["num_tokens"]
    assert 0 < formats["int8"]["logit"] < formats["fp8"]["logit"]


def test_a_model_that_is_not_there_gives_no_result(tmp_path: Path) -> None:
    """One clear line, status 1."""
    run = CliRunner().invoke(bench_app, ["kv-quant", "--model", str(tmp_path / "none")])
    assert 1 == run.exit_code
    assert "handoff bench kv-quant: " in run.output

"""`handoff bench load` sends what was asked for and says what that was."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from services.cli.bench import bench_app
from services.cli.bench_stack import free_port
from tests.support.fake_openai import fake_openai


def bench_load(*options: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """Run against a good server: the result, and the bodies that the server got."""
    with fake_openai() as fake:
        done = CliRunner().invoke(bench_app, ["load", "--url", fake.base_url, *options])
    assert done.exit_code == 0, done.output
    result: dict[str, Any] = json.loads(done.stdout.splitlines()[-1])
    return result, fake.bodies


def test_closed_loop() -> None:
    """So many requests of the given lengths; goodput is told against the limits."""
    lengths = ["--prompt-tokens", "9", "--output-tokens", "3"]
    result, bodies = bench_load("--concurrency", "2", "--requests", "6", *lengths, "--slo-ttft-ms", "0")
    assert [(len(body["prompt"]), body["max_tokens"]) for body in bodies] == [(9, 3)] * 6
    assert (result["workload"], result["num_succeeded"]) == ("closed loop, concurrency 2", 6)
    assert (result["slo"]["ttft_s"], result["goodput_per_s"]) == (0.0, 0.0)


def test_open_loop() -> None:
    """Poisson arrivals at a rate."""
    result, bodies = bench_load("--rate", "500", "--requests", "5", "--output-tokens", "2")
    assert (len(bodies), result["num_succeeded"]) == (5, 5)
    assert result["workload"] == "open loop, Poisson, 500 requests/s"


def test_trace_replay_tells_its_scale(tmp_path: Path) -> None:
    """The first rows of a shipped trace, shrunk; asked and real scale are in the result, and in the file."""
    file = tmp_path / "out.json"
    options = ["--trace", "mooncake", "--requests", "3", "--time-scale", "0.01", "--length-scale", "0.01"]
    result, bodies = bench_load(*options, "--json", str(file))
    assert sorted(len(body["prompt"]) for body in bodies) == [66, 71, 72]
    assert [body["prompt"][:5] for body in bodies[1:]] == [bodies[0]["prompt"][:5]] * 2
    assert (result["workload"], result["time_scale"], result["length_scale"]) == (
        "trace mooncake",
        0.01,
        0.01,
    )
    assert result["prompt_tokens_ratio"] == pytest.approx(209 / 21316, rel=1e-3)
    assert result == json.loads(file.read_text())


def test_chat() -> None:
    """Chat sends messages of words."""
    _, bodies = bench_load("--chat", "--requests", "1", "--prompt-tokens", "7", "--output-tokens", "2")
    assert len(bodies[0]["messages"][0]["content"].split()) == 7


@pytest.mark.parametrize(
    ("options", "status", "why"),
    [
        (["--rate", "1", "--concurrency", "1"], 2, "give one of"),
        (["--trace", "nowhere"], 1, "no trace 'nowhere'"),
        (["--trace", "mooncake", "--time-scale", "0"], 1, "positive"),
        (["--url", f"http://127.0.0.1:{free_port()}"], 1, "handoff bench load: "),
        (["--url", "not a url"], 2, "it must be http://host:port"),
    ],
)
def test_no_result_is_one_line(options: list[str], status: int, why: str) -> None:
    """A mistake or a missing server ends with a reason and no report."""
    done = CliRunner().invoke(bench_app, ["load", *options])
    assert status == done.exit_code
    assert why in done.stderr
    assert done.stdout == ""

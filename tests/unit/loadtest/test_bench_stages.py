"""`handoff bench stages` compares like with like, and refuses what it cannot compare."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from loadtest.client import Request
from loadtest.metrics import Failure, RequestRecord
from loadtest.timing import ServerTiming
from services.cli.bench import bench_app
from services.cli.bench_stack import Topology
from services.cli.bench_stages import BenchFailed, Pair, Plan, Spread, check, evaluate, measure
from tests.support.fake_openai import STAGES_MS, Answer, Script, fake_openai, whole_stream

REQUEST = Request((1, 2), 2)
PD = RequestRecord(
    started_s=0.0,
    ended_s=2.0,
    ttft_s=0.5,
    e2el_s=1.05,
    prompt_tokens=2,
    output_tokens=2,
    text="ab",
    timing=ServerTiming(
        {"prefill": 0.4, "transfer": 0.008, "decode": 0.5, "total": 1.0},
        {
            "topology": "pd",
            "kv_bytes": "4096",
            "wire_bytes": "5000",
            "hidden_transfer_ms": "1.5",
            "transport": "tcp",
        },
    ),
)
UNIFIED = replace(
    PD,
    e2el_s=1.0,
    timing=ServerTiming({"prefill": 0.4, "decode": 0.5, "total": 0.95}, {"topology": "unified"}),
)


def server(topology: Topology, order: list[str]) -> Script:
    """A server of this topology that notes when it was asked."""

    def script(path: str, body: dict[str, Any]) -> Answer:
        order.append(topology)
        stages_ms = STAGES_MS if topology == "pd" else {**STAGES_MS, "transfer": 0.0}
        parts = whole_stream(path, body, stages_ms=stages_ms, facts={"topology": topology})
        return Answer(parts, headers=())

    return script


def test_ratios_are_paired() -> None:
    """Each run is compared with its own partner; a run that was slow for both changes nothing."""
    slow = Pair(replace(PD, e2el_s=10.4), replace(UNIFIED, e2el_s=10.0))
    result = evaluate(Plan(runs=3), [Pair(PD, UNIFIED), slow, Pair(UNIFIED, UNIFIED)])
    assert Spread(median=1.04, min=1.0, max=1.05) == result.ratio


def test_the_three_way_split_and_the_rest() -> None:
    """Prefill, exposed transfer, decode, and what is left of the server's total."""
    result = evaluate(Plan(runs=1), [Pair(PD, UNIFIED)])
    expected_ms = {"prefill": 400.0, "transfer": 8.0, "decode": 500.0, "rest": 92.0}
    assert expected_ms == pytest.approx(result.split_ms())
    assert (result.kv_bytes, result.wire_bytes, result.hidden_transfer_ms) == (4096, 5000, 1.5)
    assert (result.transport, result.same_answers) == ("tcp", 1)


@pytest.mark.parametrize(
    ("prompt_tokens", "e2el_s", "transfer_s", "met"),
    [
        (128, 1.05, 0.008, [True, True]),
        (128, 1.06, 0.010, [False, False]),
        (64, 1.0, 0.5, [True]),
    ],
)
def test_goals(prompt_tokens: int, e2el_s: float, transfer_s: float, met: list[bool]) -> None:
    """Within 1.05x, and under 10 ms for 128 tokens; the second goal says nothing about other lengths."""
    timing = replace(PD.timing, stages_s={**PD.timing.stages_s, "transfer": transfer_s})
    pd = replace(PD, e2el_s=e2el_s, timing=timing)
    assert met == list(evaluate(Plan(prompt_tokens=prompt_tokens), [Pair(pd, UNIFIED)]).goals.values())


@pytest.mark.parametrize(
    ("topology", "change", "why"),
    [
        ("pd", {"failure": Failure("cut_stream", "x")}, "cut_stream"),
        ("pd", {"timing": UNIFIED.timing}, "was served unified"),
        (
            "pd",
            {"timing": ServerTiming({}, {"prompt_tokens_computed_on_decode": "3"})},
            "computed prompt tokens",
        ),
        ("unified", {"timing": ServerTiming({}, {"cached_tokens": "16"})}, "prefix cache hit of 16"),
        ("unified", {"timing": ServerTiming({}, {"retries": "1"})}, "was retried"),
        ("pd", {"output_tokens": 1}, "1 output tokens instead of 2"),
    ],
)
def test_what_is_not_the_thing_measured_is_refused(
    topology: Topology, change: dict[str, Any], why: str
) -> None:
    """A number under the wrong name is worse than none."""
    with pytest.raises(BenchFailed, match=why):
        check(replace(PD, **change), topology, REQUEST)


async def test_runs_alternate_with_the_same_prompt_and_no_prompt_twice() -> None:
    """A, B, A, B; partners get one prompt, runs get different ones, the warm-up is not counted."""
    order: list[str] = []
    with fake_openai(server("pd", order)) as pd, fake_openai(server("unified", order)) as unified:
        plan = Plan(prompt_tokens=16, output_tokens=2, runs=3, warmup=1)
        result = await measure({"pd": pd.base_url, "unified": unified.base_url}, plan)
    assert order == ["pd", "unified"] * 4
    prompts = [body["prompt"] for body in pd.bodies]
    assert prompts == [body["prompt"] for body in unified.bodies]
    assert len({tuple(prompt) for prompt in prompts}) == 4
    assert result.same_answers == 3
    assert result.stages_ms["pd"]["transfer"] == pytest.approx(2.0)


def test_the_command_prints_and_writes_the_result(tmp_path: Path) -> None:
    """Tables and goal lines for people, one JSON line last, the same in the file, exit status 0."""
    order: list[str] = []
    file = tmp_path / "result.json"
    with fake_openai(server("pd", order)) as pd, fake_openai(server("unified", order)) as unified:
        arguments = [
            "stages",
            "--pd-url",
            pd.base_url,
            "--unified-url",
            unified.base_url,
            "--json",
            str(file),
        ]
        done = CliRunner().invoke(bench_app, [*arguments, "--output-tokens", "3", "--runs", "2"])
    assert done.exit_code == 0, done.output
    assert "goal: exposed transfer of 128 tokens under 10 ms: met" in done.output
    assert "goal: PD within 1.05x of unified: " in done.output
    result = json.loads(file.read_text())
    assert result == json.loads(done.stdout.splitlines()[-1])
    assert result["kv_bytes"] == 4096
    assert {"pd", "unified"} == result["stages_ms"].keys()


def test_no_result_is_exit_status_1() -> None:
    """A unified stack in the place of PD gives one line and no numbers."""
    with fake_openai(server("unified", [])) as fake:
        arguments = ["stages", "--pd-url", fake.base_url, "--unified-url", fake.base_url]
        done = CliRunner().invoke(bench_app, arguments)
    assert done.exit_code == 1
    assert done.stderr.endswith("handoff bench stages: pd: a request was served unified\n")
    assert done.stdout == ""

"""The locust users and the load client against a server: every number arrives, and nothing fails.

`base_url` is the server under test.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from loadtest.client import LoadClient
from loadtest.drive import closed_loop
from loadtest.metrics import summarise
from loadtest.timing import STAGES
from loadtest.workload import synthetic
from tests.support.cluster import Cluster
from tests.support.fake_openai import Answer, fake_openai, whole_stream

REPOSITORY = Path(__file__).parents[2]
ALWAYS_THERE = [stage for stage in STAGES if stage != "retry"]


@pytest.fixture
def base_url(pd: Cluster) -> str:
    """A real router with a prefill and a decode worker behind it."""
    return pd.url


def locust(folder: Path, base_url: str, *options: str) -> tuple[int, dict[str, dict[str, Any]]]:
    """Run locust headless in its own process (it patches the standard library); exit code, statistics by type."""
    command = [
        sys.executable,
        "-m",
        "locust",
        "-f",
        "loadtest/locustfile.py",
        "--headless",
        "--host",
        base_url,
    ]
    command += ["--json-file", str(folder / "stats"), "--stop-timeout", "20", "-t", "80s", *options]
    environment = {name: value for name, value in os.environ.items() if not name.startswith("LOCUST_")}
    done = subprocess.run(
        command, cwd=REPOSITORY, env=environment, capture_output=True, text=True, timeout=90, check=False
    )
    file = folder / "stats.json"
    assert file.exists(), done.stdout + done.stderr
    return done.returncode, {row["method"]: row for row in json.loads(file.read_text())}


def test_locust_reports_ttft_itl_and_stages(base_url: str, tmp_path: Path) -> None:
    """A headless run of two users has no failure, and TTFT, ITL, TPOT and every stage as metrics."""
    code, rows = locust(
        tmp_path, base_url, "-u", "2", "--requests", "8", "--prompt-tokens", "24", "--max-tokens", "4"
    )
    assert code == 0
    wanted = {"POST", "TTFT", "ITL", "TPOT", "stage:total", *(f"stage:{stage}" for stage in ALWAYS_THERE)}
    assert wanted <= rows.keys()
    assert {0} == {row["num_failures"] for row in rows.values()}
    assert rows["POST"]["num_requests"] == rows["stage:prefill"]["num_requests"] == 8
    assert rows["ITL"]["num_requests"] >= rows["TTFT"]["num_requests"] > 0


def test_locust_replays_a_trace_and_stops(base_url: str, tmp_path: Path) -> None:
    """A trace is sent once, and the run ends when it is over, long before its time limit."""
    trace = tmp_path / "trace.csv"
    rows = [f"2023-11-16 18:15:46.{i}000000,{8 + i},4" for i in range(6)]
    trace.write_text("TIMESTAMP,ContextTokens,GeneratedTokens\n" + "\n".join(rows) + "\n")
    code, stats = locust(tmp_path, base_url, "-u", "2", "-r", "2", "--trace", str(trace))
    assert code == 0
    assert (stats["POST"]["num_requests"], stats["POST"]["num_failures"]) == (6, 0)


@pytest.mark.parametrize("cut", [True, False])
def test_locust_counts_what_was_not_whole_as_failed(tmp_path: Path, cut: bool) -> None:
    """A stream that is cut, by a hang-up or by a clean end too early, is a failure and gives no TTFT."""

    def script(path: str, body: dict[str, object]) -> Answer:
        return Answer(whole_stream(path, body)[:2], cut=cut)

    with fake_openai(script) as fake:
        code, rows = locust(tmp_path, fake.base_url, "-u", "1", "--requests", "3", "--max-tokens", "4")
    assert code == 1
    assert rows["POST"]["num_requests"] == rows["POST"]["num_failures"] == 3
    assert "TTFT" not in rows


async def test_the_load_client_measures_every_request(base_url: str) -> None:
    """Closed loop: all requests succeed, with exact lengths, latencies and stage times."""
    requests = synthetic(prompt_tokens=24, max_tokens=4)
    async with LoadClient(base_url) as client:
        records = await closed_loop(client, (next(requests) for _ in range(6)), concurrency=2)
    summary = summarise(records)
    assert (summary.num_requests, summary.num_succeeded, summary.failures) == (6, 6, {})
    assert (summary.prompt_tokens, summary.output_tokens) == (6 * 24, 6 * 4)
    assert summary.ttft.num == summary.e2el.num == 6
    assert set(ALWAYS_THERE) <= summary.stages_ms.keys()

"""What `handoff bench overlap` makes of its measurements."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from services.cli.bench_overlap import CHUNKS, LAYERS, NONE, Plan, Result, Run, print_overlap


def runs(*exposed_ms: float) -> list[Run]:
    """Hand-offs of 20 MB with 1.5 ms of it hidden."""
    return [Run(value, 1.5, 1000.0, 20_000_000, "shm") for value in exposed_ms]


@pytest.mark.parametrize(("exposed_ms", "met"), [(3.9, True), (4.0, False)])
def test_the_goal_is_a_share_of_the_unoverlapped_median(exposed_ms: float, met: bool) -> None:
    """Under a fifth of all that a transfer takes, by medians; one slow run of either way changes nothing."""
    result = Result(
        Plan("tiny"),
        {NONE: runs(18.5, 500, 17.5), CHUNKS: runs(8), LAYERS: runs(exposed_ms, 0.1, exposed_ms * 9)},
    )

    assert [met] == list(result.goals.values())
    assert pytest.approx(exposed_ms / 20) == result.share(LAYERS)
    assert {NONE: 18.5 / 20, CHUNKS: 0.4} == {way: result.share(way) for way in (NONE, CHUNKS)}
    assert pytest.approx(exposed_ms / 18.5) == result.share_of_exposed(LAYERS)


def test_every_way_is_printed_on_one_line() -> None:
    """With its median and both shares, in a terminal of 80 columns."""
    console = Console(file=io.StringIO(), width=80)
    print_overlap(console, Result(Plan("tiny"), {NONE: runs(18.5), CHUNKS: runs(8.25), LAYERS: runs(2)}))

    assert isinstance(console.file, io.StringIO)
    lines = console.file.getvalue().splitlines()
    assert any(CHUNKS in line and "8.25" in line and "44.6%" in line and "41.2%" in line for line in lines)
    assert any(LAYERS in line and "2.00" in line and "10.8%" in line and "10.0%" in line for line in lines)


def test_only_the_last_way_sends_layers() -> None:
    """Without overlap the whole prompt is one chunk; all else is the workers' default."""
    ways = Plan("tiny", chunk_size=64).ways()

    assert {"HANDOFF_CHUNK_SIZE": "0", "HANDOFF_KV_LAYER_GROUPS": "0"} == ways[NONE]
    assert {"HANDOFF_CHUNK_SIZE": "64", "HANDOFF_KV_LAYER_GROUPS": "0"} == ways[CHUNKS]
    assert {"HANDOFF_CHUNK_SIZE": "64"} == ways[LAYERS]

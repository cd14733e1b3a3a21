"""`handoff bench transfer`: what it makes of its measurements, and that every way really works."""

from __future__ import annotations

import json
import multiprocessing
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from typer.testing import CliRunner

from services.cli import bench_transfer
from services.cli.bench import bench_app
from services.cli.bench_transfer import Plan, Result, measure_transfer
from services.cli.transfer_kv import SHAPE, Setup, Way, injected, opened
from services.cli.transfer_nixl import BeRead, reading_as_it_comes
from services.cli.transfer_ways import BARE_NIXL, MEMCPY, NIXL_AS_IT_COMES, QUEUE, RAW_TCP
from shared.kv.transports.base import TransportUnavailable

TRANSPORTS = ("shm", "unix", "tcp", "nixl")
BESIDE = {MEMCPY, RAW_TCP, QUEUE, BARE_NIXL, NIXL_AS_IT_COMES}
WAYS = {*BESIDE, *TRANSPORTS, *map(injected, TRANSPORTS), *map(opened, TRANSPORTS)}


def result(**ms: float) -> Result:
    """A result in which each way took so many milliseconds at every size."""
    names = {
        "memcpy": MEMCPY,
        "raw": RAW_TCP,
        "queue": QUEUE,
        "shm_injected": injected("shm"),
        "shm_opened": opened("shm"),
        "bare": BARE_NIXL,
        "as_it_comes": NIXL_AS_IT_COMES,
    }
    plan = Plan()
    seconds = {
        size: {names.get(way, way): [value / 1e3] * 3 for way, value in ms.items()} for size in plan.sizes_mib
    }
    return Result(plan, seconds)


def test_sizes_are_prompts() -> None:
    """3.5 and 28 MiB are the KV of 128 and 1,024 tokens."""
    assert [37, 128, 1024, 4096] == [Plan().tokens(size) for size in Plan().sizes_mib]
    assert 128 * SHAPE.bytes_per_token == int(3.5 * 2**20)


def test_goals_met_and_missed() -> None:
    """Limits are absolute, or relative to what was measured in the same run."""
    beside = {"memcpy": 3, "raw": 3, "queue": 100, "bare": 3, "as_it_comes": 5}
    good = result(**beside, shm=0.9, shm_injected=0.9, shm_opened=0.9, unix=20, tcp=3.9, nixl=3.9)
    assert {True} == set(good.goals.values())
    bad = result(**beside, shm=26, shm_injected=26, shm_opened=26, unix=26, tcp=26, nixl=26)
    assert 15 == len(bad.goals)
    assert {False} == set(bad.goals.values())
    assert {} == result(**beside).goals


def test_percentiles() -> None:
    """p99 is the nearest rank: of a few runs the slowest."""
    measured = Result(Plan(), {28.0: {"shm": [run / 1e3 for run in range(1, 201)]}})
    assert 100.5 == pytest.approx(measured.p50_ms(28.0, "shm"))
    assert 198 == pytest.approx(measured.p99_ms(28.0, "shm"))
    assert 28 * 2**20 / 0.1005 / 1e9 == pytest.approx(measured.gb_per_s(28.0, "shm"))


def test_a_yardstick_that_fails_loses_no_result(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nor a transport that does not work here. The result says which is missing and why, and has no goal for it."""

    @contextmanager
    def some_ways(_: Setup) -> Iterator[dict[str, Way]]:
        yield {BARE_NIXL: lambda _: 0.003, "nixl": lambda _: 0.003}

    @contextmanager
    def failing(total_bytes: int) -> Iterator[BeRead]:
        if total_bytes:
            raise TransportUnavailable("out of order")
        yield lambda _: 0.0

    monkeypatch.setattr(bench_transfer, "ways", some_ways)
    monkeypatch.setattr(bench_transfer, "reading_as_it_comes", failing)
    measured = measure_transfer(Plan((28.0,), runs=3), (0, 0), ("shm", "nixl"), scattered=False)
    assert {"shm", NIXL_AS_IT_COMES} == set(measured.missing)
    assert "out of order" == measured.missing[NIXL_AS_IT_COMES]
    assert measured.missing == measured.to_dict()["missing"]
    assert [f"nixl 28 MiB within 1.3 times {BARE_NIXL}: 3.00 of 3.90 ms"] == list(measured.goals)


def test_a_reader_that_dies_is_an_error_at_once() -> None:
    """And no process is left, whoever ends first."""
    before = set(multiprocessing.active_children())
    with reading_as_it_comes(4096) as be_read:
        assert be_read(4096) > 0
        (child,) = set(multiprocessing.active_children()) - before
        child.kill()
        with pytest.raises(ConnectionResetError):
            be_read(4096)
    assert before == set(multiprocessing.active_children())


@pytest.mark.slow
def test_every_way_is_measured(tmp_path: Path) -> None:
    """A real, tiny run: two processes, all ways, JSON; the cores of this process are its own again afterwards."""
    cores = os.sched_getaffinity(0)
    path = tmp_path / "result.json"
    command = ["transfer", "--sizes", "0.1,0.5", "--runs", "3", "--scattered", "--json", str(path)]
    command += ["--transports", ",".join(TRANSPORTS)]
    run = CliRunner().invoke(bench_app, command)
    assert 0 == run.exit_code, run.output
    sizes = json.loads(path.read_text())["sizes"]
    assert ["0.1", "0.5"] == list(sizes)
    assert all(set(by_way) == WAYS for by_way in sizes.values())
    assert all(
        3 == facts["runs"] and facts["p50_ms"] > 0 for ways in sizes.values() for facts in ways.values()
    )
    assert cores == os.sched_getaffinity(0)

"""`handoff bench router` as a whole: real routers, workers without a model."""

from __future__ import annotations

import os
from pathlib import Path

from services.cli.bench_router import Plan, measure_router


def test_a_real_run_measures_every_way(tiny_model: Path) -> None:
    """Two routers over workers that answer at once; they spoke an older protocol once, and no router took them."""
    cores = sorted(os.sched_getaffinity(0))
    try:
        result = measure_router(Plan(runs=3, streams=2, tokens=8, rounds=1), tiny_model, cores, os.environ)
    finally:
        os.sched_setaffinity(0, cores)
    assert {"pd", "pd worker", "prefill alone", "unified", "unified worker"} == set(result.first_s)
    assert {3} == {len(times) for times in result.first_s.values()}
    assert result.tokens_per_s[0] > 0

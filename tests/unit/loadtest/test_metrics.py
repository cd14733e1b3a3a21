"""Percentiles and summaries are the stated definitions, computed by hand here."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.metrics import SLO, Distribution, Failure, RequestRecord, percentile, stage_medians_s, summarise
from loadtest.timing import ServerTiming

GOOD = RequestRecord(
    started_s=10.0,
    ended_s=12.0,
    ttft_s=0.5,
    e2el_s=1.5,
    itl_s=(0.25, 0.75),
    prompt_tokens=8,
    output_tokens=3,
    timing=ServerTiming({"prefill": 0.4, "decode": 1.0, "total": 1.5}),
)
BAD = replace(GOOD, failure=Failure("cut_stream", "x"), ttft_s=99.0, ended_s=14.0)


@given(st.lists(st.floats(0, 1e6), min_size=1, max_size=50), st.floats(0, 100))
def test_percentile_is_numpys_default(values: list[float], p: float) -> None:
    """Definition 7 of Hyndman and Fan, as numpy has it."""
    assert percentile(sorted(values), p) == pytest.approx(float(np.percentile(values, p)), rel=1e-9, abs=1e-9)


def test_percentile_of_nothing_raises() -> None:
    """No values have no percentile, and 0 would be a lie."""
    for values, p in (([], 50), ([1.0], 101), ([1.0], -1)):
        with pytest.raises(ValueError, match="percentile"):
            percentile(values, p)


def test_distribution_is_in_milliseconds() -> None:
    """Seconds in any order go in, milliseconds come out."""
    assert Distribution(2, 1500.0, 1500.0, 1900.0, 1990.0) == Distribution.of([2.0, 1.0])
    assert Distribution(0, None, None, None, None) == Distribution.of([])


def test_tpot_needs_two_tokens() -> None:
    """(E2EL - TTFT) / (n - 1) does not exist for one token, nor when usage is unknown."""
    assert GOOD.tpot_s == 0.5
    assert replace(GOOD, output_tokens=1).tpot_s is None
    assert replace(GOOD, output_tokens=None).tpot_s is None


def test_failures_give_no_latency_and_no_tokens() -> None:
    """A failed request is counted by its kind; its times stay out of every number but the duration."""
    summary = summarise([GOOD, BAD, BAD])
    assert (summary.num_requests, summary.num_succeeded, summary.failures) == (3, 1, {"cut_stream": 2})
    assert (summary.ttft.num, summary.ttft.p99_ms, summary.output_tokens) == (1, 500.0, 3)
    assert (summary.duration_s, summary.requests_per_s, summary.output_tokens_per_s) == (4.0, 0.25, 0.75)


def test_itl_is_pooled_and_tpot_is_per_request() -> None:
    """Two requests of two gaps: four ITL, two TPOT."""
    summary = summarise([GOOD, GOOD])
    assert (summary.itl.num, summary.itl.mean_ms) == (4, 500.0)
    assert (summary.tpot.num, summary.tpot.mean_ms) == (2, 500.0)


@pytest.mark.parametrize(
    ("slo", "met"),
    [
        (SLO(), True),
        (SLO(ttft_s=0.5, tpot_s=0.5, e2el_s=1.5), True),
        (SLO(ttft_s=0.49), False),
        (SLO(tpot_s=0.49), False),
        (SLO(e2el_s=1.49), False),
    ],
)
def test_goodput_counts_what_meets_every_limit(slo: SLO, met: bool) -> None:
    """One limit broken, or a failure, and a request does not count."""
    assert met == slo.met_by(GOOD)
    assert not slo.met_by(BAD)
    assert summarise([GOOD, BAD], slo).goodput_per_s == (0.25 if met else 0.0)


def test_stage_medians_have_the_rest_and_the_total() -> None:
    """Only what was reported appears, in the order of the stages; the unexplained part is shown."""
    other = replace(GOOD, timing=ServerTiming({"prefill": 0.6, "decode": 1.0, "total": 1.9}))
    medians_s = stage_medians_s([GOOD, other, BAD])
    assert list(medians_s) == ["prefill", "decode", "unaccounted", "total"]
    assert medians_s == pytest.approx({"prefill": 0.5, "decode": 1.0, "unaccounted": 0.2, "total": 1.7})


def test_a_summary_of_nothing_is_json() -> None:
    """A run without requests still reports."""
    assert json.loads(json.dumps(summarise([]).to_dict()))["num_requests"] == 0

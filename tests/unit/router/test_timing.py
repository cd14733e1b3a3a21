"""Stages and reports as header text."""

from __future__ import annotations

import math

from router.report import Report, Way, as_dict, combined, headers
from router.timing import AT_FIRST_TOKEN, Stages, header_text, server_timing


def stages() -> Stages:
    """Each stage with its own value, in seconds."""
    return Stages(0.001, 0.002, 0.003, 0.1234567, 0.005, 0.006, 0.007, 0.0005, 0.0, 0.15)


def test_server_timing_names_every_stage_in_order() -> None:
    """Milliseconds with three decimals; retry is absent when nothing was retried."""
    assert (
        "route;dur=1.000, reserve;dur=2.000, queue;dur=3.000, prefill;dur=123.457, transfer;dur=5.000, "
        "decode_queue;dur=6.000, decode;dur=7.000, relay;dur=0.500, total;dur=150.000"
    ) == server_timing(stages())


def test_at_the_first_token_only_the_past_is_told() -> None:
    """A stream's headers hold no stage that is still to come."""
    assert ["route", "reserve", "queue", "prefill"] == list(stages().as_ms(known=AT_FIRST_TOKEN))


def test_numbers_that_are_none_are_left_out() -> None:
    """NaN, infinity and negative zero-ish values never reach a header."""
    odd = Stages(route=math.nan, reserve=math.inf, queue=-1e-9)
    assert {"route", "reserve"}.isdisjoint(odd.as_ms())
    assert 0.0 == odd.as_ms()["queue"]


def test_accounted_is_all_but_the_total() -> None:
    """The sum that is compared with the total."""
    assert math.isclose(0.1479567, stages().accounted)


def test_worker_names_cannot_split_headers() -> None:
    """Everything but visible ASCII is replaced and long names are cut."""
    assert "a__X-Evil:_1_" == header_text("a\r\nX-Evil: 1é")
    assert 128 == len(header_text("n" * 1000))
    report = Report(prompt_tokens=1, way=Way(prefill_worker="p\r\n", decode_worker="名"))
    found = headers(report, at_first_token=False)
    assert ("p__", "_") == (found["x-handoff-prefill-worker"], found["x-handoff-decode-worker"])
    assert all(value.isascii() and value.isprintable() for value in found.values())


def test_combined_adds_counts_and_takes_the_last_way() -> None:
    """Several prompts: counts are summed, the way is that of the one that ended last."""
    first = Report(10, cached_tokens=4, completion_tokens=3, retries=1, way=Way(decode_worker="d0"))
    last = Report(5, cached_tokens=1, completion_tokens=2, way=Way(decode_worker="d1"))
    both = combined([first, last], total_s=2.5)
    assert (15, 5, 5, 1, "d1", 2.5) == (
        both.prompt_tokens,
        both.cached_tokens,
        both.completion_tokens,
        both.retries,
        both.way.decode_worker,
        both.way.stages.total,
    )
    assert {"total": 2500.0}.items() <= as_dict(both)["stages_ms"].items()


def test_relay_is_what_the_workers_did_not_measure() -> None:
    """The router's window around the workers, less their own stages; too much measured shows as no relay."""
    way = Way(stages=Stages(queue=1.0, prefill=2.0, transfer=0.5, decode=4.0))
    way.entered_at = 100.0
    way.left(107.75)
    assert 0.25 == way.stages.relay
    way.left(107.0)
    assert 0.0 == way.stages.relay

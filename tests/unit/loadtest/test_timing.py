"""What the server tells about its time is read as it was written, and only that."""

from __future__ import annotations

import pytest

from loadtest.timing import ServerTiming, from_comment, from_headers


def test_headers_give_stages_in_seconds_and_facts() -> None:
    """Server-Timing is in milliseconds, repeats and carries descriptions; X-Handoff-* are facts."""
    timing = from_headers(
        [
            ("Server-Timing", 'route;dur=1.5, cache;desc="a, b;dur=9", prefill;desc=x;dur=20'),
            ("server-timing", "decode-queue;dur=0.25,total;dur=30"),
            ("X-Handoff-Kv-Bytes", "4096"),
            ("X-Request-Id", "no fact"),
        ]
    )
    expected_s = {"route": 0.0015, "prefill": 0.02, "decode_queue": 0.00025, "total": 0.03}
    assert expected_s == pytest.approx(dict(timing.stages_s))
    assert timing.facts == {"kv_bytes": "4096"}
    assert timing.number("kv_bytes") == 4096


@pytest.mark.parametrize("value", ["", "route", "route;dur=", "route;dur=x", ";;,,", "route;dur=1e999"])
def test_a_header_that_cannot_be_read_gives_nothing(value: str) -> None:
    """A stage without a number is absent: nothing is guessed."""
    assert from_headers([("Server-Timing", value)]).stages_s == {}


def test_the_comment_gives_stages_and_facts() -> None:
    """Flat or grouped, milliseconds become seconds and the rest facts."""
    timing = from_comment(
        'server-timing {"stages_ms": {"prefill": 20, "decode": 30}, "total_ms": 60, "transport": "tcp",'
        ' "kv_bytes": 4096, "cached": true, "nothing": null}'
    )
    assert timing is not None
    assert pytest.approx(dict(timing.stages_s)) == {"prefill": 0.02, "decode": 0.03, "total": 0.06}
    assert timing.facts == {"transport": "tcp", "kv_bytes": "4096", "cached": "true"}
    assert timing.unaccounted_s == pytest.approx(0.01)


@pytest.mark.parametrize("text", ["keep-alive", "server-timing {", "server-timing [1]", "server-timings {}"])
def test_other_comments_are_not_timing(text: str) -> None:
    """Keep-alives and damaged JSON are passed over."""
    assert from_comment(text) is None


def test_the_later_account_holds() -> None:
    """The end of a stream knows more than its head; what only the head told stays."""
    head = ServerTiming({"route": 0.001, "total": 9.0}, {"topology": "pd"})
    end = ServerTiming({"total": 0.5}, {"kv_bytes": "1"})
    both = ServerTiming({"route": 0.001, "total": 0.5}, {"topology": "pd", "kv_bytes": "1"})
    assert both == head.updated(end)


def test_without_a_total_nothing_is_unaccounted() -> None:
    """No total, no remainder: None, not a negative number."""
    assert ServerTiming({"prefill": 1.0}).unaccounted_s is None

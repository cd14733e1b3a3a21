"""One stream becomes one record: the numbers are the glossary's, and only a whole stream is a success."""

from __future__ import annotations

import pytest

from loadtest.measure import StreamMeasurement
from loadtest.metrics import RequestRecord
from tests.support.fake_openai import event


def text(content: str, finish_reason: str | None = None) -> bytes:
    """A completions chunk."""
    return event({"choices": [{"index": 0, "text": content, "finish_reason": finish_reason}]})


USAGE = event({"choices": [], "usage": {"prompt_tokens": 3, "completion_tokens": 4}})
DONE = event("[DONE]")
REFUSED = event({"error": {"code": "overloaded", "message": "m"}})


def measure(*timed: tuple[float, bytes], started_s: float = 100.0) -> RequestRecord:
    """Feed bytes at their times; the stream ends with the last of them."""
    measurement = StreamMeasurement(started_s)
    for now_s, data in timed:
        measurement.feed(data, now_s)
    return measurement.end(timed[-1][0] if timed else started_s)


def test_the_numbers_of_a_good_stream() -> None:
    """TTFT skips the empty first piece; ITL are gaps of texts; E2EL ends at the last token, not [DONE]."""
    record = measure(
        (101.0, text("")),
        (102.0, text("a")),
        (102.5, text("b")),
        (103.5, text("c", "length")),
        (109.0, USAGE + b': server-timing {"decode": 1500}\n\n' + DONE),
    )
    assert record.failure is None
    assert (record.ttft_s, record.itl_s, record.e2el_s) == (2.0, (0.5, 1.0), 3.5)
    assert record.tpot_s == pytest.approx(1.5 / 3)
    assert (record.prompt_tokens, record.output_tokens, record.finish_reason) == (3, 4, "length")
    assert (record.text, record.timing.stages_s) == ("abc", {"decode": 1.5})


def test_an_end_token_without_text_is_the_last_token() -> None:
    """finish_reason "stop" comes with a token that has no text: E2EL reaches to it, ITL does not."""
    record = measure((101.0, text("a")), (102.0, text("", "stop")), (103.0, USAGE + DONE))
    assert (record.ttft_s, record.itl_s, record.e2el_s) == (1.0, (), 2.0)


def test_an_answer_without_text_is_a_success_without_ttft() -> None:
    """A first token that ends the answer has nothing to see."""
    record = measure((101.0, text("", "stop") + DONE))
    assert (record.failure, record.ttft_s, record.e2el_s, record.tpot_s) == (None, None, 1.0, None)


def test_chat_pieces_and_tool_calls_are_text() -> None:
    """Role-only deltas are no token; contents and the arguments of tool calls are."""
    call = {"tool_calls": [{"index": 0, "function": {"arguments": "{}"}}]}
    deltas = [{"role": "assistant", "content": ""}, {"content": "x"}, call, {"content": None}]
    record = measure(
        *((101.0 + i, event({"choices": [{"delta": delta}]})) for i, delta in enumerate(deltas)),
        (106.0, event({"choices": [{"delta": {}, "finish_reason": "tool_calls"}]}) + DONE),
    )
    assert (record.failure, record.text, record.ttft_s) == (None, "x{}", 2.0)


@pytest.mark.parametrize(
    ("kind", "data"),
    [
        ("cut_stream", b""),
        ("cut_stream", text("a")),
        ("cut_stream", text("a", "stop")),
        ("cut_stream", text("a", "stop") + b"data: [DONE]\n"),
        ("cut_stream", text("a") + DONE),
        ("malformed_stream", b"data: {half\n\n" + DONE),
        ("malformed_stream", event([1]) + DONE),
        ("malformed_stream", event({"choices": ["x"]}) + DONE),
        ("malformed_stream", b"data: \xff\n\n"),
        ("malformed_stream", text("a", "stop") + DONE + text("b")),
        (
            "error_event_overloaded",
            text("a") + REFUSED + DONE,
        ),
        ("error_event", event({"error": "plain"})),
        ("error_event", b"event: error\ndata: {}\n\n"),
    ],
)
def test_what_is_not_whole_is_a_failure(kind: str, data: bytes) -> None:
    """A cut, damaged or refused stream is never a success, whatever text came before."""
    record = measure((101.0, data))
    assert record.failure is not None
    assert kind == record.failure.kind


def test_the_first_failure_is_the_cause() -> None:
    """An error event followed by a hang-up is that error, not a cut."""
    measurement = StreamMeasurement(0.0)
    measurement.feed(event({"error": {"type": "engine_fault", "message": "it broke"}}), 1.0)
    failure = measurement.fail("cut_stream", "peer closed", 2.0).failure
    assert failure is not None
    assert (failure.kind, failure.detail) == ("error_event_engine_fault", "it broke")

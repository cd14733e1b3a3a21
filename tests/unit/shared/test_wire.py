"""Bodies between our processes: round trips, bounds, and nothing unknown let through."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from shared.wire import (
    DecodeEvent,
    DecodeRequest,
    ErrorBody,
    Fingerprint,
    First,
    Handoff,
    PrefillEvent,
    PrefillRequest,
    Sampling,
    TokenOut,
    Wire,
    Work,
)

HANDOFF = Handoff(handoff_id="h-1", epoch=3, kv_url="http://127.0.0.1:9/kv/h-1", ticket="t", have_tokens=16)


def work(**changes: Any) -> dict[str, Any]:
    """A valid body of /v1/decode with `changes`."""
    body: dict[str, Any] = {
        "request_id": "req-1",
        "token_ids": [1, 2, 3],
        "num_prompt_tokens": 3,
        "sampling": {"max_tokens": 5},
        "timeout_s": 10.0,
    }
    return body | changes


@pytest.mark.parametrize(
    "message",
    [
        DecodeRequest.model_validate(work(mode="local")),
        PrefillRequest.model_validate(work(handoff=HANDOFF.model_dump())),
        DecodeEvent(reserved=HANDOFF),
        DecodeEvent(tokens=[TokenOut(choice=0, token_id=7, finish_reason="stop")]),
        DecodeEvent(error=ErrorBody(code="overloaded", message="full", retry_after_s=1.0)),
        PrefillEvent(first=First(tokens=[], cached_tokens=1, computed_tokens=2, queue_s=0.0, prefill_s=0.5)),
        PrefillEvent(done=True),
    ],
    ids=lambda message: type(message).__name__,
)
def test_a_message_survives_its_line(message: Wire) -> None:
    """What is written is read back equal, and a line holds no line end."""
    line = message.to_json()
    assert b"\n" not in line
    assert message == type(message).model_validate_json(line)


@given(
    st.builds(
        Sampling,
        temperature=st.floats(0, 100),
        top_p=st.floats(0, 1),
        seed=st.integers(0, 2**64 - 1),
        max_tokens=st.integers(1, 10**6),
        logit_bias=st.dictionaries(st.integers(0, 2**31 - 1), st.floats(-100, 100), max_size=4),
        stop_token_ids=st.lists(st.integers(0, 2**31 - 1), max_size=4).map(tuple),
    )
)
def test_sampling_survives_its_line_bit_for_bit(sampling: Sampling) -> None:
    """A seed of 64 bits, a float and integer keys of a dict lose nothing in JSON."""
    assert sampling == Sampling.model_validate_json(sampling.to_json())


@pytest.mark.parametrize(
    "change",
    [
        {"protocol": 3},
        {"request_id": ""},
        {"request_id": "../../x"},
        {"request_id": "a" * 129},
        {"request_id": "a b"},
        {"token_ids": []},
        {"token_ids": [-1]},
        {"token_ids": [2**31]},
        {"num_prompt_tokens": 0},
        {"num_prompt_tokens": 4},
        {"num_choices": 0},
        {"num_choices": 129},
        {"timeout_s": 0},
        {"timeout_s": float("inf")},
        {"surprise": 1},
        {"sampling": {"max_tokens": -1}},
        {"token_ids": [1, 2, 3, 4], "sampling": {"max_tokens": 0}},
        {"sampling": {"max_tokens": 1, "temperature": float("nan")}},
        {"sampling": {"max_tokens": 1, "top_p": 1.5}},
        {"sampling": {"max_tokens": 1, "seed": 2**64}},
        {"sampling": {"max_tokens": 1, "num_logprobs": 21}},
        {"sampling": {"max_tokens": 1, "logit_bias": {"-1": 0.0}}},
        {"token_ids": [1, 2, 3, 4], "sampling": {"max_tokens": 1}},
        {"mode": "elsewhere"},
    ],
    ids=str,
)
def test_work_out_of_bounds_is_refused(change: dict[str, Any]) -> None:
    """Nothing that could index outside of something, or never end, reaches an engine."""
    with pytest.raises(ValidationError):
        DecodeRequest.model_validate(work(**change))


def test_a_hand_off_without_a_first_token_is_refused() -> None:
    """max_tokens 0 reads the prompt alone, which decode could not go on from: it used to be an internal error."""
    with pytest.raises(ValidationError, match="at least 1"):
        PrefillRequest.model_validate(work(handoff=HANDOFF.model_dump(), sampling={"max_tokens": 0}))
    assert PrefillRequest.model_validate(work(sampling={"max_tokens": 0})).handoff is None


def test_tokens_left_after_a_lost_worker() -> None:
    """Generated tokens that travel behind the prompt are taken off what may still be drawn."""
    resumed = Work.model_validate(work(token_ids=[1, 2, 3, 8, 9], num_prompt_tokens=3))
    assert 3 == resumed.max_new_tokens


def test_messages_are_frozen() -> None:
    """A message that was checked cannot change afterwards."""
    with pytest.raises(ValidationError):
        HANDOFF.epoch = 4  # type: ignore[misc]


def test_fingerprints_name_what_differs() -> None:
    """Every field counts, in order, and equal fingerprints have equal digests."""
    one = Fingerprint(
        weights="w", config="c", tokenizer="t", dtype="float32", layout="l", rope="r",
        num_layers=2, num_kv_heads=1, head_dim=8,
    )  # fmt: skip
    two = one.model_copy(update={"dtype": "bfloat16", "head_dim": 16})
    assert [] == one.differences(one)
    assert ["dtype", "head_dim"] == one.differences(two)
    assert one.digest != two.digest
    assert one.digest == Fingerprint.model_validate_json(one.to_json()).digest
    assert 32 == len(one.digest)

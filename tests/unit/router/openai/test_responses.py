"""Answers: every object parses with the client library's own types, streamed equals whole."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from typing import Any

import pytest
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from router.openai.responses import DONE, Answer, ChatAnswer, CompletionAnswer, Usage, event
from router.text.choice import ChoiceText, Piece
from router.text.stop import StopSet
from router.text.tokenizer import TextTokenizer
from shared.wire import FinishReason, Logprobs, TokenOut

USAGE = Usage(prompt_tokens=7, completion_tokens=5, cached_tokens=4)
TEXT = ' Paris, 你好 😀.\n"quoted" \u2028 \x00 </script>'


def answer_of(cls: type[Answer], tokenizer: TextTokenizer, **options: Any) -> Answer:
    """An answer with fixed ids."""
    return cls("abc123", created=1_700_000_000, model="m", fingerprint="fp_1", tokenizer=tokenizer, **options)


def pieces_of(
    tokenizer: TextTokenizer,
    text: str = TEXT,
    *,
    stops: Sequence[str] = (),
    logprobs: bool = False,
    last: FinishReason = "length",
) -> list[Piece]:
    """What a choice of this text gives, each token once; with logprobs its two best tokens are 5 and -inf."""
    ids = tokenizer.encode(text)
    choice = ChoiceText(tokenizer, [], StopSet(stops))
    values = Logprobs(token=-0.5, top=[(5, -0.1), (6, -math.inf)]) if logprobs else None
    return [
        choice.push(
            TokenOut(choice=0, token_id=i, logprobs=values, finish_reason=last if n == len(ids) - 1 else None)
        )
        for n, i in enumerate(ids)
    ]


def events_of(stream: bytes) -> list[dict[str, Any]]:
    """The JSON of each event; checks the framing."""
    assert stream.endswith(b"\n\n") or not stream
    lines = stream.split(b"\n\n")[:-1]
    assert all(line.startswith(b"data: ") and b"\n" not in line for line in lines)
    return [json.loads(line.removeprefix(b"data: "), parse_constant=pytest.fail) for line in lines]


def stream(
    answer: Answer, choices: Sequence[Sequence[Piece]], usage: Usage | None = None
) -> list[dict[str, Any]]:
    """All events of an answer, choices one after the other."""
    body = b"".join(
        answer.start(index) + b"".join(answer.piece(index, piece, usage) for piece in pieces)
        for index, pieces in enumerate(choices)
    )
    return events_of(body)


def test_whole_answers_parse_strictly(tokenizer: TextTokenizer) -> None:
    """Both whole answers are what the openai package's types say, with text, reasons and usage in place."""
    choices = [pieces_of(tokenizer, logprobs=True), pieces_of(tokenizer, "a", last="stop", logprobs=True)]
    chat = ChatCompletion.model_validate_json(
        answer_of(ChatAnswer, tokenizer, logprobs=True).whole(choices, USAGE), strict=True
    )
    text = Completion.model_validate_json(
        answer_of(CompletionAnswer, tokenizer, logprobs=True).whole(choices, USAGE), strict=True
    )

    assert ("chatcmpl-abc123", "chat.completion", 1_700_000_000, "m") == (
        chat.id,
        chat.object,
        chat.created,
        chat.model,
    )
    assert ("cmpl-abc123", "text_completion", "fp_1") == (text.id, text.object, text.system_fingerprint)
    assert [TEXT, ""] == [choice.message.content for choice in chat.choices]
    assert [TEXT, ""] == [choice.text for choice in text.choices]
    assert ["length", "stop"] == [choice.finish_reason for choice in chat.choices]
    assert [0, 1] == [choice.index for choice in text.choices]
    for usage in (chat.usage, text.usage):
        assert usage is not None
        assert usage.prompt_tokens_details is not None
        counts = (usage.prompt_tokens, usage.completion_tokens, usage.total_tokens)
        assert (7, 5, 12, 4) == (*counts, usage.prompt_tokens_details.cached_tokens)


@pytest.mark.parametrize("logprobs", [True, False])
def test_streamed_chat_equals_whole_chat(tokenizer: TextTokenizer, logprobs: bool) -> None:
    """One role first, one reason last, text and logprobs that join to the whole answer's."""
    choices = [pieces_of(tokenizer, logprobs=logprobs), pieces_of(tokenizer, "Hi", logprobs=logprobs)]
    answer = answer_of(ChatAnswer, tokenizer, logprobs=logprobs)
    whole = json.loads(answer.whole(choices, USAGE))
    events = stream(answer, choices)
    chunks = [ChatCompletionChunk.model_validate_json(json.dumps(e), strict=True) for e in events]

    assert {("chatcmpl-abc123", "chat.completion.chunk", 1_700_000_000, "m", "fp_1")} == {
        (c.id, c.object, c.created, c.model, c.system_fingerprint) for c in chunks
    }
    assert not any("usage" in e for e in events)
    for index in (0, 1):
        mine = [c.choices[0] for c in chunks if c.choices[0].index == index]
        expected = whole["choices"][index]
        assert ["assistant"] == [c.delta.role for c in mine if c.delta.role]
        assert ("assistant", "") == (mine[0].delta.role, mine[0].delta.content)
        assert expected["message"]["content"] == "".join(c.delta.content or "" for c in mine)
        assert [*[None] * (len(mine) - 1), expected["finish_reason"]] == [c.finish_reason for c in mine]
        assert mine[-1].delta.content is None
        entries = [e.model_dump() for c in mine if c.logprobs for e in c.logprobs.content or []]
        assert (expected["logprobs"]["content"] if logprobs else []) == entries


@pytest.mark.parametrize("logprobs", [True, False])
def test_streamed_completion_equals_whole_completion(tokenizer: TextTokenizer, logprobs: bool) -> None:
    """No opening event, "text" in each, and lists that join to the whole answer's."""
    choices = [pieces_of(tokenizer, logprobs=logprobs)]
    answer = answer_of(CompletionAnswer, tokenizer, logprobs=logprobs)
    whole = json.loads(answer.whole(choices, USAGE))["choices"][0]
    events = stream(answer, choices)
    for e in events:  # the package's type has no null reason, although its streams do
        reason = e["choices"][0]["finish_reason"] or "stop"
        Completion.model_validate_json(
            json.dumps(e | {"choices": [e["choices"][0] | {"finish_reason": reason}]}), strict=True
        )
    mine = [e["choices"][0] for e in events]

    assert answer.start(0) == b""
    assert whole["text"] == "".join(c["text"] for c in mine)
    assert [*[None] * (len(mine) - 1), "length"] == [c["finish_reason"] for c in mine]
    if logprobs:
        for name, values in whole["logprobs"].items():
            assert values == [value for c in mine if c["logprobs"] for value in c["logprobs"][name]]
    else:
        assert all(c["logprobs"] is None for c in mine)


def test_completion_logprobs_have_four_lists_that_fit(tokenizer: TextTokenizer) -> None:
    """Equal lengths, tokens that join to the text, running offsets, best tokens and the chosen one, no infinity."""
    for stops in ([], ["你"], ["ris"]):
        pieces = pieces_of(tokenizer, logprobs=True, stops=stops)
        choice = json.loads(answer_of(CompletionAnswer, tokenizer, logprobs=True).whole([pieces], USAGE))[
            "choices"
        ][0]
        lists = choice["logprobs"]
        assert {"tokens", "token_logprobs", "top_logprobs", "text_offset"} == set(lists)
        assert 1 == len({len(values) for values in lists.values()})
        assert choice["text"] == "".join(lists["tokens"])
        assert [len("".join(lists["tokens"][:n])) for n in range(len(lists["tokens"]))] == lists[
            "text_offset"
        ]
        assert {-0.5} == set(lists["token_logprobs"])
        assert all(2 <= len(best) <= 3 and min(best.values()) == -9999.0 for best in lists["top_logprobs"])


def test_chat_logprobs_have_exact_bytes(tokenizer: TextTokenizer) -> None:
    """The bytes of the chosen tokens join to the content, also where a character spans tokens."""
    pieces = pieces_of(tokenizer, logprobs=True)
    choice = json.loads(answer_of(ChatAnswer, tokenizer, logprobs=True).whole([pieces], USAGE))["choices"][0]
    entries = choice["logprobs"]["content"]

    assert choice["message"]["content"].encode() == bytes(b for entry in entries for b in entry["bytes"])
    assert len(tokenizer.encode(TEXT)) == len(entries)
    assert [-0.1, -9999.0] == [best["logprob"] for best in entries[0]["top_logprobs"]]
    assert all("bytes" in best for entry in entries for best in entry["top_logprobs"])


def test_logprobs_without_text_are_empty_lists(tokenizer: TextTokenizer) -> None:
    """A whole answer that ends at once still has the lists that were asked for."""
    ended = [Piece(finish_reason="stop")]
    chat = json.loads(answer_of(ChatAnswer, tokenizer, logprobs=True).whole([ended], USAGE))["choices"][0]
    text = json.loads(answer_of(CompletionAnswer, tokenizer, logprobs=True).whole([ended], USAGE))["choices"][
        0
    ]

    assert ([], "") == (chat["logprobs"]["content"], chat["message"]["content"])
    assert [] == text["logprobs"]["tokens"]


@pytest.mark.parametrize("cls", [ChatAnswer, CompletionAnswer])
@pytest.mark.parametrize("logprobs", [True, False])
def test_usage_comes_only_when_asked_and_then_last(
    tokenizer: TextTokenizer, cls: type[Answer], logprobs: bool
) -> None:
    """Asked for, every event has "usage": null and the last one the counts and no choices."""
    answer = answer_of(cls, tokenizer, include_usage=True, logprobs=logprobs)
    events = stream(answer, [pieces_of(tokenizer, logprobs=logprobs)])
    last = events_of(answer.usage(USAGE, {"total_s": 0.5}))[0]

    assert all(e["usage"] is None for e in events)
    assert ([], 12, {"total_s": 0.5}) == (last["choices"], last["usage"]["total_tokens"], last["timing"])
    assert "timing" not in events_of(answer.usage(USAGE))[0]
    parser = ChatCompletionChunk if cls is ChatAnswer else Completion
    parser.model_validate_json(json.dumps(last), strict=True)


@pytest.mark.parametrize("cls", [ChatAnswer, CompletionAnswer])
def test_usage_can_come_with_every_piece(tokenizer: TextTokenizer, cls: type[Answer]) -> None:
    """Continuous counts are in each event of a piece."""
    answer = answer_of(cls, tokenizer, include_usage=True)
    pieces = b"".join(answer.piece(0, piece, USAGE) for piece in pieces_of(tokenizer))

    assert {12} == {e["usage"]["total_tokens"] for e in events_of(pieces)}


@pytest.mark.parametrize("cls", [ChatAnswer, CompletionAnswer])
def test_an_empty_answer_has_an_opening_and_an_ending(tokenizer: TextTokenizer, cls: type[Answer]) -> None:
    """An end token first: chat still says the role once, both give the reason once."""
    events = stream(answer_of(cls, tokenizer), [[Piece(finish_reason="stop")]])

    assert (2 if cls is ChatAnswer else 1) == len(events)
    assert "stop" == events[-1]["choices"][0]["finish_reason"]


def test_a_piece_with_nothing_is_no_event(tokenizer: TextTokenizer) -> None:
    """A token that is held back sends nothing."""
    assert b"" == answer_of(ChatAnswer, tokenizer).piece(0, Piece())


def test_other_events() -> None:
    """The end mark, and any object as one data line."""
    assert b"data: [DONE]\n\n" == DONE
    assert [{"error": {"message": "a\nb"}}] == events_of(event({"error": {"message": "a\nb"}}))

"""Answers of both endpoints, whole and as server-sent events, from the pieces of their choices.

In: pieces in the order they are settled. Out: bytes. What all events of an answer share is serialised once; an
event with nothing but text is put together from that and the text, which is most of what a router sends.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any

import orjson

from router.openai.calls import call_delta, whole_calls
from router.openai.logprobs import chat_logprobs, completion_logprobs
from router.openai.scores import LogprobEncoder
from router.text.choice import Piece, TokenEntry
from router.text.tokenizer import TextTokenizer
from shared.asgi.text import one_line_json

DONE = b"data: [DONE]\n\n"
_END = b"\n\n"


@dataclass(frozen=True, slots=True)
class Usage:
    """Token counts of a request: prompts once each, however many choices; cached_tokens of them from a cache."""

    prompt_tokens: int
    completion_tokens: int
    cached_tokens: int = 0

    def to_json(self) -> dict[str, Any]:
        """As the API has it."""
        return {
            "prompt_tokens": self.prompt_tokens,
            "completion_tokens": self.completion_tokens,
            "total_tokens": self.prompt_tokens + self.completion_tokens,
            "prompt_tokens_details": {"cached_tokens": self.cached_tokens},
        }


def event(content: Mapping[str, Any]) -> bytes:
    """One server-sent event: JSON has no raw line ends, so it is one data line."""
    return b"data: " + one_line_json(content) + _END


def timing_comment(timing: Mapping[str, Any]) -> bytes:
    """Where the time went, as a comment that clients skip."""
    return b": server-timing " + orjson.dumps(timing) + _END


class Answer(ABC):
    """What both endpoints' answers share. One object per request; `id` is one for all its events.

    include_usage: every event but the last has "usage": null, and `usage` makes that last one.
    """

    prefix: str
    whole_object: str
    stream_object: str
    opening: Mapping[str, str] | None = None
    logprob_lists: Callable[..., dict[str, Any]]

    def __init__(
        self,
        response_id: str,
        *,
        created: int,
        model: str,
        fingerprint: str,
        tokenizer: TextTokenizer,
        include_usage: bool = False,
        logprobs: bool = False,
        by_id: bool = False,
        prompts: Sequence[Sequence[int]] | None = None,
    ) -> None:
        """response_id: the unique part of the id. created: Unix seconds. fingerprint: of the model served.

        logprobs: they were asked for, so a whole answer has the lists even if it has no text.
        by_id: their tokens are named by id.
        prompts: given if token ids were asked for: the prompt's ids of every choice, by index.
        """
        self.id = self.prefix + response_id
        self._scores = LogprobEncoder(partial(self.logprob_lists, tokenizer=tokenizer, by_id=by_id))
        self._include_usage = include_usage
        self._logprobs = logprobs
        self._prompts = prompts
        self._head = {"created": created, "model": model, "system_fingerprint": fingerprint}
        head = orjson.dumps({"id": self.id, "object": self.stream_object} | self._head)
        self._open = b"data: " + head[:-1] + b',"choices":['
        self._no_usage = b'],"usage":null}' + _END if include_usage else b"]}" + _END
        self._text_middles: dict[int, tuple[bytes, bytes]] = {}

    def start(self, index: int, usage: Usage | None = None) -> bytes:
        """What opens a choice's stream; may be nothing. usage: counts so far, where each event has them."""
        if self.opening is None:
            return b""
        choice = {"index": index, "delta": dict(self.opening), "logprobs": None, "finish_reason": None}
        return self._event(choice, usage)

    def piece(self, index: int, piece: Piece, usage: Usage | None = None) -> bytes:
        """The events of one piece, in order: its text, its calls, its ending. usage: counts so far, for each."""
        if usage is None and self._prompts is None and piece.is_plain:
            begin, end = self._around_text(index)
            return begin + one_line_json(piece.text) + end
        chunks: list[dict[str, Any]] = []
        if piece.text or piece.entries:
            chunks.append(self._chunk(index, piece.text, piece.entries, None))
        chunks += [self._chunk(index, None, (), None) | {"delta": call_delta(call)} for call in piece.calls]
        if piece.finish_reason is not None:
            chunks.append(self._chunk(index, None, (), piece.finish_reason))
        if self._prompts is not None:
            for chunk in chunks:
                chunk["token_ids"] = piece.token_ids if chunk is chunks[-1] else []
        return b"".join(self._event(chunk, usage) for chunk in chunks)

    def usage(self, usage: Usage, timing: Mapping[str, Any] | None = None) -> bytes:
        """The last event before DONE, where it was asked for. timing: stage times to show beside the counts."""
        content = {"id": self.id, "object": self.stream_object, **self._head, "choices": []}
        shown = content | {"usage": usage.to_json()}
        return event(shown if timing is None else shown | {"timing": timing})

    def closing(self, usage: Usage, timing: Mapping[str, Any]) -> bytes:
        """The end of a stream: usage if it was asked for, the timing comment, [DONE]."""
        counts = self.usage(usage, timing) if self._include_usage else b""
        return counts + timing_comment(timing) + DONE

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        """The JSON body of the answer that is not streamed: all pieces of each choice, in index order."""
        logprobs = self._scores.joined(choices) if self._logprobs else [None] * len(choices)
        return orjson.dumps(
            {
                "id": self.id,
                "object": self.whole_object,
                **self._head,
                "choices": [
                    self._whole_choice(index, pieces, logprobs[index]) for index, pieces in enumerate(choices)
                ],
                "usage": usage.to_json(),
            }
        )

    def _whole_choice(
        self, index: int, pieces: Sequence[Piece], logprobs: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        text = "".join(piece.text for piece in pieces)
        reason = next((piece.finish_reason for piece in pieces if piece.finish_reason), None)
        choice = self._choice(index, text, logprobs, reason)
        if self._prompts is not None:
            choice["token_ids"] = [token for piece in pieces for token in piece.token_ids]
            choice["prompt_token_ids"] = self._prompts[index]
        return choice

    def _event(self, choice: Mapping[str, Any], usage: Usage | None) -> bytes:
        end = self._no_usage if usage is None else b'],"usage":' + orjson.dumps(usage.to_json()) + b"}" + _END
        return self._open + one_line_json(choice) + end

    def _around_text(self, index: int) -> tuple[bytes, bytes]:
        """What stands before and after the text in an event that has nothing else; made once per choice."""
        around = self._text_middles.get(index)
        if around is None:
            mark = "\x00"
            whole = self._event(self._chunk(index, mark, (), None), None)
            begin, _, end = whole.rpartition(orjson.dumps(mark))
            around = self._text_middles[index] = (begin, end)
        return around

    @abstractmethod
    def _chunk(
        self, index: int, text: str | None, entries: Sequence[TokenEntry], finish_reason: str | None
    ) -> dict[str, Any]:
        """A choice of a streamed event. text None: there is only an ending to tell."""

    @abstractmethod
    def _choice(
        self, index: int, text: str, logprobs: Mapping[str, Any] | None, finish_reason: str | None
    ) -> dict[str, Any]: ...


class CompletionAnswer(Answer):
    """Of /v1/completions."""

    prefix = "cmpl-"
    whole_object = stream_object = "text_completion"
    logprob_lists = staticmethod(completion_logprobs)

    def _chunk(
        self, index: int, text: str | None, entries: Sequence[TokenEntry], finish_reason: str | None
    ) -> dict[str, Any]:
        logprobs = self._scores.one(entries) if entries else None
        return {"index": index, "text": text or "", "logprobs": logprobs, "finish_reason": finish_reason}

    def _choice(
        self, index: int, text: str, logprobs: Mapping[str, Any] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish_reason}


class ChatAnswer(Answer):
    """Of /v1/chat/completions."""

    prefix = "chatcmpl-"
    whole_object = "chat.completion"
    stream_object = "chat.completion.chunk"
    logprob_lists = staticmethod(chat_logprobs)
    opening = MappingProxyType({"role": "assistant", "content": ""})

    def _chunk(
        self, index: int, text: str | None, entries: Sequence[TokenEntry], finish_reason: str | None
    ) -> dict[str, Any]:
        delta = {} if text is None else {"content": text}
        logprobs = self._scores.one(entries) if entries else None
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish_reason}

    def _whole_choice(
        self, index: int, pieces: Sequence[Piece], logprobs: Mapping[str, Any] | None
    ) -> dict[str, Any]:
        choice = super()._whole_choice(index, pieces, logprobs)
        calls = whole_calls(call for piece in pieces for call in piece.calls)
        if calls:
            message = choice["message"]
            message |= {"content": message["content"] or None, "tool_calls": calls}
        return choice

    def _choice(
        self, index: int, text: str, logprobs: Mapping[str, Any] | None, finish_reason: str | None
    ) -> dict[str, Any]:
        return {
            "index": index,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

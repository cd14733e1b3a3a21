"""Answers of /v1/responses, whole and as its typed events, from the pieces of the one choice.

The output is a list of items, open one at a time: text is part of a message, each call is an item of its own.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from router.openai.logprobs import chat_logprobs
from router.openai.responses import Usage, timing_comment
from router.text.choice import Piece
from router.text.tokenizer import TextTokenizer
from router.text.tools_parser import CallDelta
from shared.asgi.text import one_line_json


class ResponseAnswer:
    """One object per request. told: what the response repeats of its request, sampling included."""

    def __init__(
        self,
        response_id: str,
        *,
        created: int,
        model: str,
        told: Mapping[str, Any],
        tokenizer: TextTokenizer,
    ) -> None:
        self.id = f"resp_{response_id}"
        self._unique = response_id
        self._head = {"id": self.id, "object": "response", "created_at": created, "model": model, **told}
        self._tokenizer = tokenizer
        self._sequence = 0
        self._items: list[_Item] = []
        self._is_complete = True

    def start(self, index: int, usage: Usage | None = None) -> bytes:  # noqa: ARG002 - there is one choice
        """The events before the first item."""
        response = self._response("in_progress", None)
        created = self._event("response.created", response=response)
        return created + self._event("response.in_progress", response=response)

    def piece(self, index: int, piece: Piece, usage: Usage | None = None) -> bytes:  # noqa: ARG002
        """The events of a piece's text and calls; its ending is told by `closing`."""
        if piece.finish_reason is not None:
            self._is_complete = piece.finish_reason != "length"
        events = b""
        if piece.text:
            if not self._items or self._items[-1].call is not None:
                events += self._open(None)
            item = self._items[-1]
            item.content.append(piece.text)
            logprobs = chat_logprobs(piece.entries, self._tokenizer)["content"]
            item.logprobs += logprobs
            events += self._event(
                "response.output_text.delta",
                **item.part_place,
                delta=piece.text,
                logprobs=_without_bytes(logprobs),
            )
        for call in piece.calls:
            if call.name is not None:
                events += self._open(call)
            item = self._items[-1]
            item.content.append(call.arguments)
            if call.arguments:
                kind = "response.function_call_arguments.delta"
                events += self._event(kind, **item.place, delta=call.arguments)
        return events

    def closing(self, usage: Usage, timing: Mapping[str, Any]) -> bytes:
        """The events after the last piece, and where the time went. This endpoint has no [DONE]."""
        events = b"" if self._items else self._open(None)
        events += self._close_last(self._status)
        response = self._response(self._status, usage)
        return events + timing_comment(timing) + self._event(f"response.{self._status}", response=response)

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        """The JSON body of the answer that is not streamed."""
        (pieces,) = choices
        for piece in pieces:
            self.piece(0, piece)
        if not self._items:
            self._open(None)
        self._close_last(self._status)
        return orjson.dumps(self._response(self._status, usage))

    @property
    def _status(self) -> str:
        return "completed" if self._is_complete else "incomplete"

    def _open(self, call: CallDelta | None) -> bytes:
        """Begin the next item, a message without `call`; what was open is complete."""
        events = self._close_last("completed")
        item = _Item(self._unique, len(self._items), call)
        self._items.append(item)
        events += self._event("response.output_item.added", output_index=item.index, item=item.shown())
        if call is None:
            events += self._event("response.content_part.added", **item.part_place, part=_part("", []))
        return events

    def _close_last(self, status: str) -> bytes:
        if not self._items:
            return b""
        item = self._items[-1]
        item.status = status
        content = "".join(item.content)
        if item.call is None:
            logprobs = _without_bytes(item.logprobs)
            events = self._event(
                "response.output_text.done", **item.part_place, text=content, logprobs=logprobs
            )
            events += self._event("response.content_part.done", **item.part_place, part=item.part())
        else:
            events = self._event(
                "response.function_call_arguments.done", **item.place, arguments=content, name=item.call.name
            )
        return events + self._event("response.output_item.done", output_index=item.index, item=item.shown())

    def _response(self, status: str, usage: Usage | None) -> dict[str, Any]:
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._head,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": reason,
            "output": [item.shown() for item in self._items],
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
        }

    def _event(self, kind: str, **content: Any) -> bytes:
        body = one_line_json({"type": kind, "sequence_number": self._sequence, **content})
        self._sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"


class _Item:
    """One item of the output: a message, or the call of a function. content: its text or arguments, in pieces."""

    def __init__(self, unique: str, index: int, call: CallDelta | None) -> None:
        self.index = index
        self.call = call
        self.status = "in_progress"
        self.content: list[str] = []
        self.logprobs: list[dict[str, Any]] = []
        self._id = f"{'msg' if call is None else 'fc'}_{unique}_{index}"
        self.place = {"item_id": self._id, "output_index": index}
        self.part_place = {**self.place, "content_index": 0}

    def part(self) -> dict[str, Any]:
        """A message's text with the logprobs of its tokens; those of calls have no place in this API."""
        return _part("".join(self.content), self.logprobs)

    def shown(self) -> dict[str, Any]:
        """As the API has it by now."""
        content = "".join(self.content)
        if self.call is not None:
            shown: dict[str, Any] = {
                "type": "function_call",
                "call_id": self.call.id,
                "name": self.call.name,
                "arguments": content,
            }
        else:
            parts = [] if self.status == "in_progress" else [self.part()]
            shown = {"type": "message", "role": "assistant", "content": parts}
        return {"id": self._id, "status": self.status, **shown}


def _part(text: str, logprobs: list[dict[str, Any]]) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": logprobs}


def _without_bytes(logprobs: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """As events of this API have them."""
    return [
        {
            "token": entry["token"],
            "logprob": entry["logprob"],
            "top_logprobs": [{"token": t["token"], "logprob": t["logprob"]} for t in entry["top_logprobs"]],
        }
        for entry in logprobs
    ]


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }

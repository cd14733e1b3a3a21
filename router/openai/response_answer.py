"""Answers of /v1/responses, whole and as its typed events, from the pieces of the one choice."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from router.openai.responses import Usage, timing_comment
from router.text.choice import Piece


class ResponseAnswer:
    """One object per request. told: what the response repeats of its request, sampling included."""

    def __init__(self, response_id: str, *, created: int, model: str, told: Mapping[str, Any]) -> None:
        self.id = f"resp_{response_id}"
        self._message_id = f"msg_{response_id}"
        self._head = {"id": self.id, "object": "response", "created_at": created, "model": model, **told}
        self._place = {"item_id": self._message_id, "output_index": 0, "content_index": 0}
        self._sequence = 0
        self._text: list[str] = []
        self._is_complete = True

    def start(self, index: int) -> bytes:  # noqa: ARG002 - there is one choice
        """The events before the first text."""
        in_progress = self._response("in_progress", [], None)
        return b"".join(
            [
                self._event("response.created", response=in_progress),
                self._event("response.in_progress", response=in_progress),
                self._event("response.output_item.added", output_index=0, item=self._message(None)),
                self._event("response.content_part.added", **self._place, part=_part("")),
            ]
        )

    def piece(self, index: int, piece: Piece, usage: Usage | None = None) -> bytes:  # noqa: ARG002
        """The event of a piece of text; its ending is told by `closing`."""
        if piece.finish_reason is not None:
            self._is_complete = piece.finish_reason == "stop"
        if not piece.text:
            return b""
        self._text.append(piece.text)
        return self._event("response.output_text.delta", **self._place, delta=piece.text, logprobs=[])

    def closing(self, usage: Usage, timing: Mapping[str, Any]) -> bytes:
        """The events after the last text, and where the time went. This endpoint has no [DONE]."""
        text = "".join(self._text)
        response = self._response(self._status, [self._message(text)], usage)
        return b"".join(
            [
                self._event("response.output_text.done", **self._place, text=text, logprobs=[]),
                self._event("response.content_part.done", **self._place, part=_part(text)),
                self._event("response.output_item.done", output_index=0, item=self._message(text)),
                timing_comment(timing),
                self._event(f"response.{self._status}", response=response),
            ]
        )

    def whole(self, choices: Sequence[Sequence[Piece]], usage: Usage) -> bytes:
        """The JSON body of the answer that is not streamed."""
        (pieces,) = choices
        for piece in pieces:
            self.piece(0, piece)
        return orjson.dumps(self._response(self._status, [self._message("".join(self._text))], usage))

    @property
    def _status(self) -> str:
        return "completed" if self._is_complete else "incomplete"

    def _message(self, text: str | None) -> dict[str, Any]:
        """The one output item; None: it has only begun."""
        return {
            "id": self._message_id,
            "type": "message",
            "role": "assistant",
            "status": "in_progress" if text is None else self._status,
            "content": [] if text is None else [_part(text)],
        }

    def _response(self, status: str, output: list[dict[str, Any]], usage: Usage | None) -> dict[str, Any]:
        reason = {"reason": "max_output_tokens"} if status == "incomplete" else None
        return {
            **self._head,
            "status": status,
            "background": False,
            "error": None,
            "incomplete_details": reason,
            "output": output,
            "previous_response_id": None,
            "reasoning": {"effort": None, "summary": None},
            "service_tier": "default",
            "store": False,
            "truncation": "disabled",
            "usage": None if usage is None else _usage(usage),
        }

    def _event(self, kind: str, **content: Any) -> bytes:
        body = orjson.dumps({"type": kind, "sequence_number": self._sequence, **content})
        self._sequence += 1
        return b"event: " + kind.encode() + b"\ndata: " + body + b"\n\n"


def _part(text: str) -> dict[str, Any]:
    return {"type": "output_text", "text": text, "annotations": [], "logprobs": []}


def _usage(usage: Usage) -> dict[str, Any]:
    return {
        "input_tokens": usage.prompt_tokens,
        "input_tokens_details": {"cached_tokens": usage.cached_tokens, "cache_write_tokens": 0},
        "output_tokens": usage.completion_tokens,
        "output_tokens_details": {"reasoning_tokens": 0},
        "total_tokens": usage.prompt_tokens + usage.completion_tokens,
    }

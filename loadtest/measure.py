"""From the bytes of one streamed answer to a RequestRecord. No I/O; the clock is passed in.

Both load generators (httpx in client.py, locust in locustfile.py) measure through this, so that their numbers
mean the same. An answer is a success only if it was whole: status 200, a finish reason, and `[DONE]`.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping

from loadtest.metrics import Failure, RequestRecord
from loadtest.sse import Comment, Event, SSEParser
from loadtest.timing import ServerTiming, from_comment, from_headers

DONE = "[DONE]"


class StreamMeasurement:
    """Feed one answer in the order it arrives: `headers`, `feed` per read, then `end` (or `fail`), once."""

    def __init__(self, started_s: float) -> None:
        """started_s: the clock just before the request was sent; every later reading is of the same clock."""
        self._started_s = started_s
        self._parser = SSEParser()
        self._timing = ServerTiming()
        self._failure: Failure | None = None
        self._first_text_s: float | None = None
        self._last_text_s: float | None = None
        self._last_token_s: float | None = None
        self._itl_s: list[float] = []
        self._text: list[str] = []
        self._usage: Mapping[str, object] = {}
        self._finish_reason: str | None = None
        self._done = False

    def headers(self, headers: Iterable[tuple[str, str]]) -> None:
        """Take the timing headers of the answer."""
        self._timing = self._timing.updated(from_headers(headers))

    def feed(self, data: bytes, now_s: float) -> None:
        """Take bytes of the body that were received at now_s."""
        try:
            for item in self._parser.feed(data):
                if isinstance(item, Comment):
                    self._timing = self._timing.updated(from_comment(item.text) or ServerTiming())
                else:
                    self._event(item, now_s)
        except (ValueError, TypeError, KeyError, AttributeError) as exc:
            self._fail_once("malformed_stream", f"{type(exc).__name__}: {exc}")

    def fail(self, kind: str, detail: str, now_s: float) -> RequestRecord:
        """The request ended badly for a reason outside the body (connection, time-out, status)."""
        self._fail_once(kind, detail)
        return self._record(now_s)

    def end(self, now_s: float) -> RequestRecord:
        """The body ended. Whether that is a success is decided here, by what it held."""
        if self._parser.pending or not self._done:
            self._fail_once("cut_stream", f"the stream ended before {DONE}")
        elif self._finish_reason is None:
            self._fail_once("cut_stream", "the stream ended without a finish reason")
        return self._record(now_s)

    def _event(self, event: Event, now_s: float) -> None:
        if event.data == DONE:
            self._done = True
            return
        body = json.loads(event.data)
        error = body.get("error")
        if error is not None or event.name == "error":
            self._fail_once(*error_kind_and_detail(error))
            return
        if self._done:
            raise ValueError(f"an event after {DONE}")
        if isinstance(body.get("usage"), dict):
            self._usage = body["usage"]
        for choice in body.get("choices", ()):
            self._choice(choice, now_s)

    def _choice(self, choice: Mapping[str, object], now_s: float) -> None:
        text = _text_of(choice)
        if text:
            if self._last_text_s is None:
                self._first_text_s = now_s
            else:
                self._itl_s.append(now_s - self._last_text_s)
            self._last_text_s = now_s
            self._text.append(text)
        finish_reason = choice.get("finish_reason")
        if isinstance(finish_reason, str):
            self._finish_reason = finish_reason
        if text or finish_reason is not None:
            self._last_token_s = now_s

    def _fail_once(self, kind: str, detail: str) -> None:
        """The first failure is the cause; what follows it are consequences."""
        if self._failure is None:
            self._failure = Failure(kind, detail)

    def _since_start(self, at_s: float | None) -> float | None:
        return None if at_s is None else at_s - self._started_s

    def _record(self, now_s: float) -> RequestRecord:
        return RequestRecord(
            started_s=self._started_s,
            ended_s=now_s,
            failure=self._failure,
            ttft_s=self._since_start(self._first_text_s),
            e2el_s=self._since_start(self._last_token_s),
            itl_s=tuple(self._itl_s),
            prompt_tokens=_count(self._usage.get("prompt_tokens")),
            output_tokens=_count(self._usage.get("completion_tokens")),
            finish_reason=self._finish_reason,
            text="".join(self._text),
            timing=self._timing,
        )


def error_kind_and_detail(error: object) -> tuple[str, str]:
    """Of the `error` object of an OpenAI-shaped error event."""
    if not isinstance(error, dict):
        return "error_event", str(error)
    code = error.get("code") or error.get("type")
    return f"error_event_{code}" if code else "error_event", str(error.get("message", ""))


def _text_of(choice: Mapping[str, object]) -> str:
    """The text of a completions chunk, or the content and tool-call arguments of a chat chunk."""
    if (text := choice.get("text")) is not None:
        return str(text)
    delta = choice.get("delta")
    if not isinstance(delta, dict):
        return ""
    calls = delta.get("tool_calls") or ()
    arguments = "".join(str((call.get("function") or {}).get("arguments") or "") for call in calls)
    return str(delta.get("content") or "") + arguments


def _count(value: object) -> int | None:
    return value if isinstance(value, int) and not isinstance(value, bool) and value >= 0 else None

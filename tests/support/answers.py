"""The four ways to ask for text (chat or completions, whole or streamed), and what any answer must look like.

Every stream that is read here is checked: framing, one id, one role and one ending per choice, usage only if asked
for, and each event parses with the openai package's own types.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import httpx
from openai.types import Completion
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from tests.support import http
from tests.support.cluster import Cluster

GREEDY: dict[str, Any] = {"temperature": 0, "repetition_penalty": 1.0}
_OBJECTS = {"completions": ("text_completion",) * 2, "chat": ("chat.completion", "chat.completion.chunk")}
_PREFIXES = {"completions": "cmpl-", "chat": "chatcmpl-"}


@dataclass
class Choice:
    """logprobs: the four lists of completions, or chat's list of tokens; None if there were none."""

    text: str = ""
    finish_reason: str | None = None
    logprobs: dict[str, list[Any]] | list[dict[str, Any]] | None = None
    calls: list[tuple[str, str]] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)


@dataclass
class Answer:
    """Whole or put together from a stream."""

    id: str
    choices: list[Choice]
    usage: dict[str, Any] | None
    headers: httpx.Headers

    @property
    def texts(self) -> list[str]:
        return [choice.text for choice in self.choices]

    @property
    def only(self) -> Choice:
        """The answer's one choice."""
        (choice,) = self.choices
        return choice

    @property
    def counts(self) -> tuple[int, int]:
        """Prompt and completion tokens."""
        assert self.usage is not None
        return self.usage["prompt_tokens"], self.usage["completion_tokens"]


@dataclass(frozen=True)
class Way:
    """One of the four. Fields go into the request as they are, `text` as its prompt or its one user message."""

    endpoint: str
    stream: bool

    def __str__(self) -> str:
        return f"{self.endpoint}-{'stream' if self.stream else 'whole'}"

    def post(self, cluster: Cluster, text: Any = "hi", **fields: Any) -> httpx.Response:
        """Whatever the router says, errors included."""
        said = [{"role": "user", "content": text}]
        given = {"prompt": text} if self.endpoint == "completions" else {"messages": said}
        body: dict[str, Any] = {"model": "tiny", **given, "stream": self.stream} | fields
        path = "/v1/chat/completions" if self.endpoint == "chat" else "/v1/completions"
        return http.post(f"{cluster.url}{path}", json=body)

    def ask(self, cluster: Cluster, text: Any = "hi", **fields: Any) -> Answer:
        """The answer, put together and checked. Streams are asked for usage too, unless the fields say."""
        if self.stream:
            fields = {"stream_options": {"include_usage": True}} | fields
        response = self.post(cluster, text, **fields)
        assert response.status_code == 200, response.text
        if not self.stream:
            return _whole(self.endpoint, response, is_echo=bool(fields.get("echo")))
        options = fields["stream_options"] or {}
        return _streamed(self.endpoint, response, options, is_echo=bool(fields.get("echo")))


WAYS = [Way(endpoint, stream) for endpoint in ("completions", "chat") for stream in (False, True)]


def events_of(response: httpx.Response) -> list[dict[str, Any]]:
    """The objects of a stream, after a look at its framing: data or comment lines, blank lines, [DONE] last."""
    assert response.headers["content-type"] == "text/event-stream; charset=utf-8"
    assert response.text.endswith("\n\n")
    blocks = response.text.removesuffix("\n\n").split("\n\n")
    assert all(block.startswith(("data: ", ": ")) and "\n" not in block for block in blocks)
    lines = [block.removeprefix("data: ") for block in blocks if block.startswith("data: ")]
    assert lines.pop() == "[DONE]"
    return [json.loads(line) for line in lines]


def _whole(endpoint: str, response: httpx.Response, *, is_echo: bool) -> Answer:
    body = response.json()
    if endpoint == "chat":
        ChatCompletion.model_validate(body, strict=True)
    else:
        _check_type(endpoint, body, is_echo=is_echo)
    assert body["object"] == _OBJECTS[endpoint][0]
    assert body["id"].startswith(_PREFIXES[endpoint])
    assert [choice["index"] for choice in body["choices"]] == list(range(len(body["choices"])))
    return Answer(
        body["id"], [_choice(choice) for choice in body["choices"]], body["usage"], response.headers
    )


def _choice(content: dict[str, Any]) -> Choice:
    message = content.get("message", content)
    logprobs = content["logprobs"]
    calls = [(c["function"]["name"], c["function"]["arguments"]) for c in message.get("tool_calls") or ()]
    assert isinstance(content["finish_reason"], str)
    return Choice(
        message.get("text", message.get("content")) or "",
        content["finish_reason"],
        logprobs["content"] if "message" in content and logprobs is not None else logprobs,
        calls,
        content.get("token_ids", []),
    )


def _streamed(endpoint: str, response: httpx.Response, options: dict[str, Any], *, is_echo: bool) -> Answer:
    events = events_of(response)
    usage = _usage(events, options)
    assert len({event["id"] for event in events}) == 1
    assert events[0]["id"].startswith(_PREFIXES[endpoint])
    choices: dict[int, Choice] = {}
    for event in events:
        _check_type(endpoint, event, is_echo=is_echo)
        assert event["object"] == _OBJECTS[endpoint][1]
        for content in event["choices"]:
            opened = content["index"] in choices
            choice = choices.setdefault(content["index"], Choice())
            assert choice.finish_reason is None, "nothing comes after the ending"
            if endpoint == "chat":
                assert ("role" in content["delta"]) == (not opened), "the role comes first and once"
            _add(choice, content)
    assert all(choice.finish_reason for choice in choices.values())
    return Answer(events[0]["id"], [choices[i] for i in range(len(choices))], usage, response.headers)


def _check_type(endpoint: str, event: dict[str, Any], *, is_echo: bool) -> None:
    """NOTE: the package's type for completions has no null for the reason of an answer that goes on, nor for the
    logprob of a prompt's first token, both of which OpenAI's own API answers."""
    if endpoint == "chat":
        ChatCompletionChunk.model_validate(event, strict=True)
    elif not is_echo:
        choices = [
            choice | {"finish_reason": choice["finish_reason"] or "stop"} for choice in event["choices"]
        ]
        Completion.model_validate(event | {"choices": choices}, strict=True)


def _usage(events: list[dict[str, Any]], options: dict[str, Any]) -> dict[str, Any] | None:
    """Takes the usage event off. There is one, without choices, exactly if it was asked for."""
    found: dict[str, Any] | None = None
    if options.get("include_usage"):
        last = events.pop()
        assert last["choices"] == []
        found = last["usage"]
    assert all(event["choices"] for event in events)
    if not options.get("continuous_usage_stats"):
        assert all(("usage" in event) == (found is not None) for event in events)
        assert all(event.get("usage") is None for event in events)
    return found


def _add(choice: Choice, content: dict[str, Any]) -> None:
    assert ("delta" in content) != ("text" in content)
    delta = content.get("delta", content)
    choice.text += delta.get("text", delta.get("content")) or ""
    choice.finish_reason = content["finish_reason"]
    choice.token_ids += content.get("token_ids") or []
    for call in delta.get("tool_calls") or ():
        if "id" in call:
            choice.calls.append((call["function"]["name"], ""))
        name, arguments = choice.calls[call["index"]]
        choice.calls[call["index"]] = (name, arguments + call["function"]["arguments"])
    for name, values in _lists(content):
        if name == "content":
            choice.logprobs = [*(choice.logprobs or []), *values]
        else:
            lists = choice.logprobs if isinstance(choice.logprobs, dict) else {}
            choice.logprobs = lists | {name: [*lists.get(name, []), *values]}


def _lists(content: dict[str, Any]) -> Iterator[tuple[str, list[Any]]]:
    for name, values in (content["logprobs"] or {}).items():
        if values is not None:
            yield name, values

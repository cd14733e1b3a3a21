"""Bodies of /v1/responses: read as the chat request that they stand for. Nothing is stored between two of them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from pydantic import Field

from router.openai.body import parse_body
from router.openai.fields import CHAT_FIELDS, PASSED_ON, RESPONSE_FIELDS, check_refused, unknown_fields
from router.openai.items import to_messages
from router.openai.requests import ChatRequest, check_chat
from router.openai.shared_fields import Limits, validate
from router.openai.structured import json_text
from shared.errors import InvalidRequest

_LOGPROBS = "message.output_text.logprobs"
_NAMES = {  # of chat fields, the longer ones first, and what stands for them here
    "response_format.json_schema": "text.format",
    "response_format": "text.format",
    "max_completion_tokens": "max_output_tokens",
    "max_tokens": "max_output_tokens",
    "messages": "input",
}


class ResponseRequest(ChatRequest):
    """told: what the response repeats of its request."""

    told: dict[str, Any] = Field(default_factory=dict, exclude=True)

    def in_own_words(self, error: InvalidRequest) -> InvalidRequest:
        """See ChatRequest."""
        return _renamed(error)


def parse_response(body: bytes, limits: Limits) -> ResponseRequest:
    """Raises InvalidRequest, which names the field at fault."""
    content = parse_body(body)
    check_refused(content, RESPONSE_FIELDS)
    include = content.get("include") or []
    if not isinstance(include, list):
        raise InvalidRequest("include must be a list", param="include")
    chat: dict[str, Any] = {
        name: content[name] for name in (*PASSED_ON, "model", "chat_template_kwargs") if name in content
    }
    chat["messages"] = to_messages(content.get("instructions"), content.get("input"))
    chat["max_completion_tokens"] = content.get("max_output_tokens")
    chat["response_format"] = _format(content.get("text"))
    chat["tools"] = _tools(content.get("tools"))
    chat["tool_choice"] = _tool_choice(content.get("tool_choice"))
    chat["parallel_tool_calls"] = content.get("parallel_tool_calls")
    chat["logprobs"] = _LOGPROBS in include or bool(content.get("top_logprobs"))
    try:
        request = validate(ResponseRequest, chat, CHAT_FIELDS, limits)
        check_chat(request)
    except InvalidRequest as exc:
        raise _renamed(exc) from exc
    told = _told(content)
    _check_told(told)
    return request.model_copy(update={"told": told, "unknown": unknown_fields(content, RESPONSE_FIELDS)})


def _told(content: Mapping[str, Any]) -> dict[str, Any]:
    """Of a request that is known to be valid."""
    return {
        "instructions": content.get("instructions") or None,
        "max_output_tokens": content.get("max_output_tokens"),
        "metadata": content.get("metadata") or {},
        "parallel_tool_calls": content.get("parallel_tool_calls") is not False,
        "text": content.get("text") or {"format": {"type": "text"}},
        "tool_choice": content.get("tool_choice") or "auto",
        "tools": [{"parameters": None, "strict": False, **tool} for tool in content.get("tools") or []],
        "top_logprobs": content.get("top_logprobs") or 0,
        "user": content.get("user") or None,
    }


def _check_told(told: Mapping[str, Any]) -> None:
    """Raises InvalidRequest for what can be read, but is nested too deeply to be written two levels down again."""
    for name, value in told.items():
        if isinstance(value, dict | list):
            json_text({"response": {name: value}}, name)


def _tools(value: Any) -> Any:
    """Functions as chat has them, a level deeper; anything else as it is, to be refused there."""
    if not isinstance(value, list):
        return value
    return [
        {"type": "function", "function": {k: v for k, v in tool.items() if k != "type"}}
        if isinstance(tool, Mapping) and tool.get("type") == "function"
        else tool
        for tool in value
    ]


def _tool_choice(value: Any) -> Any:
    if not isinstance(value, Mapping):
        return value
    if value.get("type") == "function":
        return {"type": "function", "function": {"name": value.get("name")}}
    if value.get("type") == "allowed_tools":
        return {
            "type": "allowed_tools",
            "allowed_tools": {"mode": value.get("mode"), "tools": _tools(value.get("tools"))},
        }
    return value


def _format(text: Any) -> dict[str, Any] | None:
    """`text` as chat's response_format, which has a level more."""
    if not text:
        return None
    if not isinstance(text, dict):
        raise InvalidRequest("text must be an object", param="text")
    if text.get("verbosity") not in (None, "medium"):
        raise InvalidRequest("text.verbosity is not supported", param="text.verbosity")
    wanted = text.get("format")
    if not isinstance(wanted, dict) or wanted.get("type") != "json_schema":
        return wanted
    return {"type": "json_schema", "json_schema": {k: v for k, v in wanted.items() if k != "type"}}


def _renamed(error: InvalidRequest) -> InvalidRequest:
    """A complaint about the chat request in the words of this endpoint, which has other fields and places."""
    param = error.param or ""
    here = param.replace(".function.", ".")
    for name, own in _NAMES.items():
        if re.match(rf"{re.escape(name)}(?!\w)", param):
            here = own if own == "input" else own + here[len(name) :]
            break
    message = error.message.replace(param, here) if param else error.message
    for name, own in _NAMES.items():
        message = re.sub(rf"(?<![\w.]){re.escape(name)}(?!\w)", own, message)
    return type(error)(message, param=here or None)

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
from shared.errors import InvalidRequest

_LOGPROBS = "message.output_text.logprobs"
_NAMES = {"max_completion_tokens": "max_output_tokens", "response_format": "text.format"}


class ResponseRequest(ChatRequest):
    """told: what the response repeats of its request."""

    told: dict[str, Any] = Field(default_factory=dict, exclude=True)


def parse_response(body: bytes, limits: Limits) -> ResponseRequest:
    """Raises InvalidRequest, which names the field at fault."""
    content = parse_body(body)
    check_refused(content, RESPONSE_FIELDS)
    if _LOGPROBS in (content.get("include") or ()):
        raise InvalidRequest(f"include {_LOGPROBS} is not supported", param="include")
    chat: dict[str, Any] = {
        name: content[name] for name in (*PASSED_ON, "model", "chat_template_kwargs") if name in content
    }
    chat["messages"] = to_messages(content.get("instructions"), content.get("input"))
    chat["max_completion_tokens"] = content.get("max_output_tokens")
    chat["response_format"] = _format(content.get("text"))
    chat["tools"] = _tools(content.get("tools"))
    chat["tool_choice"] = _tool_choice(content.get("tool_choice"))
    chat["parallel_tool_calls"] = content.get("parallel_tool_calls")
    try:
        request = validate(ResponseRequest, chat, CHAT_FIELDS, limits)
        check_chat(request)
    except InvalidRequest as exc:
        raise _renamed(exc) from exc
    told = _told(content)
    return request.model_copy(update={"told": told, "unknown": unknown_fields(content, RESPONSE_FIELDS)})


def _told(content: Mapping[str, Any]) -> dict[str, Any]:
    """Of a request that is known to be valid."""
    return {
        "instructions": content.get("instructions"),
        "max_output_tokens": content.get("max_output_tokens"),
        "metadata": content.get("metadata") or {},
        "parallel_tool_calls": content.get("parallel_tool_calls") is not False,
        "text": content.get("text") or {"format": {"type": "text"}},
        "tool_choice": content.get("tool_choice") or "auto",
        "tools": [{"parameters": None, "strict": False, **tool} for tool in content.get("tools") or []],
        "user": content.get("user"),
    }


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
    if text is None:
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
    """A complaint about the chat request in the words of this endpoint."""
    param, message = error.param or "", error.message
    name = re.match(r"\w+", param)
    if name is None:
        return error
    here = "input" if name.group() == "messages" else _NAMES.get(name.group(), name.group())
    where = here if here == "input" else here + param[name.end() :].replace(".function.", ".")
    return type(error)(message.replace(param, where, 1), param=where)

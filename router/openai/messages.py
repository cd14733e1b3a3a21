"""Chat messages as clients send them to messages as templates read them.

Text parts are joined without a separator. "developer" becomes "system", because templates drop roles they do not
know. Tool-call arguments, a JSON string in the API, become the object that they spell, numbers with all their
digits; what is no JSON stays text, so that a model's own slip does not end an agent's loop. Keys that no template
reads are left out.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from router.openai import exact_json
from router.text.template import Message
from shared.errors import InvalidRequest

_ROLES = {"system": "system", "developer": "system", "user": "user", "assistant": "assistant", "tool": "tool"}
_PART_TEXT = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
_EXTRA_TEXTS = ("name", "tool_call_id", "reasoning_content")


def parse_messages(value: Any) -> list[Message]:
    """Raises InvalidRequest, naming the place, for anything that is no conversation."""
    if not isinstance(value, list):
        _refuse("messages", "must be a list of messages")
    if not value:
        _refuse("messages", "are missing or empty")
    return [_message(item, f"messages[{position}]") for position, item in enumerate(value)]


def _message(value: Any, at: str) -> Message:
    if not isinstance(value, Mapping):
        _refuse(at, "must be an object")
    given = value.get("role")
    role = _ROLES.get(given) if isinstance(given, str) else None
    if role is None:
        _refuse(f"{at}.role", f"must be one of {', '.join(_ROLES)}")
    if value.get("function_call") is not None:
        _refuse(f"{at}.function_call", "is not supported; use tool_calls")
    calls = _tool_calls(value.get("tool_calls"), f"{at}.tool_calls")
    if calls and role != "assistant":
        _refuse(f"{at}.tool_calls", "belong to assistant messages")
    content = value.get("content")
    if content is None and value.get("refusal") is not None:
        content = value["refusal"]
    message: Message = {"role": role, "content": _content(content, f"{at}.content", optional=bool(calls))}
    if calls:
        message["tool_calls"] = calls
    for key in _EXTRA_TEXTS:
        extra = value.get(key)
        if extra is None:
            continue
        if not isinstance(extra, str):
            _refuse(f"{at}.{key}", "must be text")
        message[key] = extra
    return message


def _content(value: Any, at: str, *, optional: bool) -> str | None:
    if isinstance(value, str):
        return value
    if optional and value in (None, []):
        return None
    if value is None:
        _refuse(at, "is missing")
    if not isinstance(value, list) or not value:
        _refuse(at, "must be text or a list of text parts")
    return "".join(_part(part, f"{at}[{position}]") for position, part in enumerate(value))


def _part(value: Any, at: str) -> str:
    if not isinstance(value, Mapping) or not isinstance(value.get("type"), str):
        _refuse(at, "must be an object with a type")
    kind = value["type"]
    key = _PART_TEXT.get(kind)
    if key is None:
        _refuse(f"{at}.type", f"{kind[:64]!r} is not supported; this model reads text only")
    text = value.get(key)
    if not isinstance(text, str):
        _refuse(f"{at}.{key}", "must be text")
    return text


def _tool_calls(value: Any, at: str) -> list[dict[str, Any]]:
    if value is None:
        return []
    if not isinstance(value, list):
        _refuse(at, "must be a list")
    return [_tool_call(call, f"{at}[{position}]") for position, call in enumerate(value)]


def _tool_call(value: Any, at: str) -> dict[str, Any]:
    function = value.get("function") if isinstance(value, Mapping) else None
    if not isinstance(function, Mapping):
        _refuse(at, "must be an object with a function")
    name = function.get("name")
    if not isinstance(name, str) or not name:
        _refuse(f"{at}.function.name", "must be text")
    arguments = _arguments(function.get("arguments"), f"{at}.function.arguments")
    call: dict[str, Any] = {"type": "function", "function": {"name": name, "arguments": arguments}}
    call_id = value.get("id")
    if call_id is not None:
        if not isinstance(call_id, str):
            _refuse(f"{at}.id", "must be text")
        call["id"] = call_id
    return call


def _arguments(value: Any, at: str) -> Any:
    if value is None or value == "":
        return {}
    if isinstance(value, Mapping):
        return dict(value)
    if not isinstance(value, str):
        _refuse(at, "must be JSON as text")
    try:
        return exact_json.loads(value)
    except ValueError:
        return value


def _refuse(at: str, why: str) -> NoReturn:
    raise InvalidRequest(f"{at} {why}", param=at)

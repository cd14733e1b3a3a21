"""Input items of /v1/responses to chat messages; what the messages hold is checked where chat's are."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NoReturn

from shared.errors import InvalidRequest


def to_messages(instructions: Any, value: Any) -> list[dict[str, Any]]:
    """Instructions come first, as a system message. Raises InvalidRequest.

    Function calls that follow each other become the calls of one assistant message. Reasoning items are left
    out: they are for a model of another kind.
    """
    messages: list[dict[str, Any]] = []
    if instructions not in (None, "", [], {}):
        if not isinstance(instructions, str):
            _refuse("instructions", "must be text")
        messages.append({"role": "system", "content": instructions})
    if isinstance(value, str):
        return [*messages, {"role": "user", "content": value}]
    if not isinstance(value, list) or not value:
        _refuse(
            "input", "must be text or a list of items, and is missing or empty" if not value else "is no list"
        )
    for position, item in enumerate(value):
        _add(messages, item, f"input[{position}]")
    return messages


def _add(messages: list[dict[str, Any]], item: Any, at: str) -> None:
    if not isinstance(item, Mapping):
        _refuse(at, "must be an object")
    kind = item.get("type", "message")
    if kind == "message":
        messages.append({"role": item.get("role"), "content": item.get("content")})
    elif kind == "function_call":
        function = {"name": item.get("name"), "arguments": item.get("arguments")}
        call = {"id": item.get("call_id"), "type": "function", "function": function}
        if messages and messages[-1].get("tool_calls"):
            messages[-1]["tool_calls"].append(call)
        else:
            messages.append({"role": "assistant", "content": None, "tool_calls": [call]})
    elif kind == "function_call_output":
        messages.append({"role": "tool", "tool_call_id": item.get("call_id"), "content": item.get("output")})
    elif kind != "reasoning":
        _refuse(f"{at}.type", f"{str(kind)[:64]!r} is not supported")


def _refuse(at: str, why: str) -> NoReturn:
    raise InvalidRequest(f"{at} {why}", param=at)

"""Tools as clients name them: the functions of a request, and whether and which of them must be called.

The template gets each tool as the client wrote it. Parameters are a JSON schema of an object; for a `strict` tool
all of it must be enforceable, else what cannot be enforced is left out.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NoReturn

from router.openai.structured import Constraint, json_schema, json_text
from shared.errors import InvalidRequest

MAX_TOOLS = 128
_NAME = re.compile(r"[A-Za-z0-9_-]{1,64}")
_NO_PARAMETERS = {"type": "object", "properties": {}, "additionalProperties": False}

Mode = Literal["none", "auto", "required"]


@dataclass(frozen=True, slots=True)
class Tool:
    """A function. definition: as the client wrote it. arguments: what its arguments must look like."""

    name: str
    definition: Mapping[str, Any]
    arguments: Constraint


@dataclass(frozen=True, slots=True)
class ToolChoice:
    """names: only these may be called; None for all."""

    mode: Mode
    names: tuple[str, ...] | None = None


AUTO = ToolChoice("auto")


def parse_tools(value: Any) -> list[Tool]:
    """Raises InvalidRequest, naming the place, for anything that is no list of functions."""
    if not isinstance(value, list):
        _refuse("tools", "must be a list")
    if len(value) > MAX_TOOLS:
        _refuse("tools", f"must have at most {MAX_TOOLS} tools")
    json_text(value, "tools")
    tools = [_tool(item, f"tools[{position}]") for position, item in enumerate(value)]
    if len({tool.name for tool in tools}) != len(tools):
        _refuse("tools", "must have names of their own")
    return tools


def parse_tool_choice(value: Any) -> ToolChoice:
    """A mode, one function, or a mode and a list of allowed functions."""
    if value in ("none", "auto", "required"):
        return ToolChoice(value)
    if not isinstance(value, Mapping):
        _refuse("tool_choice", "must be none, auto, required or an object that names a function")
    kind = value.get("type")
    if kind == "function":
        return ToolChoice("required", (_chosen(value, "tool_choice"),))
    if kind != "allowed_tools":
        _refuse("tool_choice.type", "must be function or allowed_tools")
    return _allowed(value.get("allowed_tools"), "tool_choice.allowed_tools")


def callable_tools(tools: Sequence[Tool], choice: ToolChoice) -> list[Tool]:
    """Those that `choice` leaves. Raises InvalidRequest if it names others, or asks for a call of none."""
    if choice.mode == "required" and not tools:
        _refuse("tool_choice", "needs tools")
    if choice.names is None:
        return list(tools)
    known = {tool.name: tool for tool in tools}
    missing = [name for name in choice.names if name not in known]
    if missing:
        _refuse("tool_choice", f"names {missing[0]!r}, which is not among the tools")
    return [known[name] for name in choice.names]


def _tool(value: Any, at: str) -> Tool:
    if not isinstance(value, Mapping):
        _refuse(at, "must be an object")
    if value.get("type") != "function":
        _refuse(f"{at}.type", "must be function")
    function = value.get("function")
    if not isinstance(function, Mapping):
        _refuse(f"{at}.function", "must be an object")
    name = function.get("name")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        _refuse(f"{at}.function.name", "must have 1 to 64 letters, digits, - or _")
    if not isinstance(function.get("description", ""), str | None):
        _refuse(f"{at}.function.description", "must be text")
    strict = function.get("strict")
    if strict is not None and not isinstance(strict, bool):
        _refuse(f"{at}.function.strict", "must be true or false")
    return Tool(name, value, _arguments(function.get("parameters"), f"{at}.function.parameters", strict))


def _arguments(schema: Any, at: str, strict: bool | None) -> Constraint:
    if schema is None:
        return json_schema(_NO_PARAMETERS, at)
    if not isinstance(schema, Mapping):
        _refuse(at, "must be a JSON schema as an object")
    if schema.get("type", "object") != "object":
        _refuse(f"{at}.type", "must be object")
    return json_schema({"type": "object", **schema}, at, lenient=not strict)


def _allowed(value: Any, at: str) -> ToolChoice:
    if not isinstance(value, Mapping) or not isinstance(value.get("tools"), list):
        _refuse(at, "must be an object with a mode and a list of tools")
    if value.get("mode") not in ("auto", "required"):
        _refuse(f"{at}.mode", "must be auto or required")
    names = [_chosen(item, f"{at}.tools[{position}]") for position, item in enumerate(value["tools"])]
    if not names:
        _refuse(f"{at}.tools", "must not be empty")
    return ToolChoice(value["mode"], tuple(dict.fromkeys(names)))


def _chosen(value: Any, at: str) -> str:
    function = value.get("function") if isinstance(value, Mapping) else None
    name = function.get("name") if isinstance(function, Mapping) else None
    if not isinstance(name, str) or not name:
        _refuse(f"{at}.function.name", "must be text")
    return name


def _refuse(at: str, why: str) -> NoReturn:
    raise InvalidRequest(f"{at} {why}", param=at)

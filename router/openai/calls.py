"""Tool calls in the shapes of the API: pieces in a stream, whole ones in an answer."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from router.text.tools_parser import CallDelta


def call_delta(call: CallDelta) -> dict[str, Any]:
    """The delta of one event. id, type and name come once, with empty arguments."""
    if call.name is None:
        return {"tool_calls": [{"index": call.index, "function": {"arguments": call.arguments}}]}
    function = {"name": call.name, "arguments": call.arguments}
    return {"tool_calls": [{"index": call.index, "id": call.id, "type": "function", "function": function}]}


def whole_calls(calls: Iterable[CallDelta]) -> list[dict[str, Any]]:
    """All pieces of a choice's calls, put together."""
    heads: list[CallDelta] = []
    arguments: list[list[str]] = []
    for call in calls:
        if call.name is not None:
            heads.append(call)
            arguments.append([])
        else:
            arguments[call.index].append(call.arguments)
    return [
        {"id": head.id, "type": "function", "function": {"name": head.name, "arguments": "".join(pieces)}}
        for head, pieces in zip(heads, arguments, strict=True)
    ]

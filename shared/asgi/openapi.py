"""What our OpenAPI pages say of every route: that errors have one shape, and which JSON a route takes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel

_ERROR: Mapping[str, Any] = {
    "type": "object",
    "required": ["error"],
    "properties": {
        "error": {
            "type": "object",
            "required": ["message", "type", "param", "code"],
            "properties": {
                "message": {"type": "string"},
                "type": {"type": "string"},
                "param": {"type": ["string", "null"]},
                "code": {"type": ["string", "null"]},
            },
        }
    },
}


def error_responses() -> dict[int | str, dict[str, Any]]:
    """For `FastAPI(responses=...)`: what every route may answer besides its own."""
    content = {"application/json": {"schema": dict(_ERROR)}}
    return {
        "4XX": {"description": "The request was refused.", "content": content},
        "5XX": {"description": "It could not be served.", "content": content},
    }


def json_body(schema: Mapping[str, Any] | type[BaseModel]) -> dict[str, Any]:
    """For `openapi_extra` of a route that reads its own body."""
    found: Any = schema
    if not isinstance(schema, Mapping):
        whole = schema.model_json_schema()
        found = _inlined(whole, whole.pop("$defs", {}))
    return {"requestBody": {"required": True, "content": {"application/json": {"schema": found}}}}


def object_schema(names: Iterable[str], *, required: Iterable[str] = ()) -> dict[str, Any]:
    """An object with these fields, of any type: what they may hold stands in docs/openai.md."""
    return {"type": "object", "properties": {name: {} for name in names}, "required": list(required)}


def _inlined(node: Any, definitions: Mapping[str, Any]) -> Any:
    """pydantic's references, which would point nowhere in a page of ours, replaced by what they name."""
    if isinstance(node, list):
        return [_inlined(item, definitions) for item in node]
    if not isinstance(node, dict):
        return node
    if "$ref" in node:
        return _inlined(definitions[node["$ref"].rpartition("/")[2]], definitions)
    return {key: _inlined(value, definitions) for key, value in node.items()}

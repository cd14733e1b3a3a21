"""What an answer must look like, as clients ask for it: response_format, vLLM's guided_* and structured_outputs.

In: a field's JSON value. Out: a `Constraint`, the grammar with the name of the field it came from. Wrong values
are refused here; whether the grammar itself is any good is checked later (router.openai.form): it takes time.
JSON schemas are enforced whether or not they are `strict`; with `strict: false` parts of a schema that cannot be
enforced are left out, else they are refused. White space between JSON tokens is bounded.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any, NoReturn

import orjson
from llguidance.gbnf_to_lark import any_to_lark

from shared.errors import InvalidRequest
from shared.wire import MAX_GRAMMAR_CHARS, Grammar

MAX_CHOICES = 4096
_WHITE_SPACE = r" |\n[ ]{0,20}|\n\t{0,10}"  # one space, or a line end and an indentation
_FORMAT_TYPES = ("text", "json_object", "json_schema")


@dataclass(frozen=True, slots=True)
class Constraint:
    """param: the client's field, for complaints. choices: the answers, where all of them were listed."""

    grammar: Grammar
    param: str
    choices: tuple[str, ...] = ()


def parse_response_format(value: Any) -> Constraint | None:
    """Of the OpenAI API: {"type": "text" | "json_object" | "json_schema", ...}."""
    if not isinstance(value, Mapping):
        _refuse("response_format", "must be an object")
    kind = value.get("type")
    if kind not in _FORMAT_TYPES:
        _refuse("response_format.type", f"must be one of {', '.join(_FORMAT_TYPES)}")
    if kind == "text":
        return None
    if kind == "json_object":
        return json_schema({"type": "object"}, "response_format")
    at = "response_format.json_schema"
    wanted = value.get("json_schema")
    if not isinstance(wanted, Mapping):
        _refuse(at, "must be an object")
    if not isinstance(wanted.get("name"), str) or not wanted["name"]:
        _refuse(f"{at}.name", "must be text")
    strict = wanted.get("strict")
    if strict is not None and not isinstance(strict, bool):
        _refuse(f"{at}.strict", "must be true or false")
    schema = wanted.get("schema")
    if not isinstance(schema, Mapping):
        _refuse(f"{at}.schema", "must be an object")
    return json_schema(schema, f"{at}.schema", lenient=strict is False)


def parse_json(value: Any, param: str) -> Constraint:
    """A JSON schema, as an object or as text."""
    if isinstance(value, str):
        try:
            value = orjson.loads(value)
        except orjson.JSONDecodeError:
            _refuse(param, "is no JSON")
    if not isinstance(value, Mapping):
        _refuse(param, "must be a JSON schema, as an object or as text")
    return json_schema(value, param)


def parse_regex(value: Any, param: str) -> Constraint:
    """A regular expression that the whole answer matches."""
    if not isinstance(value, str) or not value:
        _refuse(param, "must be a regular expression as text")
    return _constraint("regex", value, param)


def parse_choice(value: Any, param: str) -> Constraint:
    """A list of texts, one of which is the answer."""
    if not isinstance(value, list) or not value or not all(isinstance(text, str) and text for text in value):
        _refuse(param, "must be a list of texts that are not empty")
    if len(value) > MAX_CHOICES:
        _refuse(param, f"must have at most {MAX_CHOICES} texts")
    choices = tuple(dict.fromkeys(value))
    constraint = _constraint("lark", f"start: {' | '.join(map(lark_text, choices))}", param)
    return replace(constraint, choices=choices)


def parse_grammar(value: Any, param: str) -> Constraint:
    """A grammar in Lark's notation or in GBNF ("root ::= ...")."""
    if not isinstance(value, str) or not value.strip():
        _refuse(param, "must be a grammar as text")
    if len(value) > MAX_GRAMMAR_CHARS:
        _refuse(param, f"must have at most {MAX_GRAMMAR_CHARS} characters")
    try:
        lark = any_to_lark(value)
    except Exception as exc:  # the converter raises whatever it trips over
        raise InvalidRequest(f"{param} is neither a Lark nor a GBNF grammar", param=param) from exc
    return _constraint("lark", lark, param)


_PARSERS: dict[str, Callable[[Any, str], Constraint]] = {
    "json": parse_json,
    "regex": parse_regex,
    "choice": parse_choice,
    "grammar": parse_grammar,
}


def parse_structured_outputs(value: Any, param: str = "structured_outputs") -> Constraint | None:
    """vLLM's object with exactly one of json, json_object, regex, choice, grammar."""
    if not isinstance(value, Mapping):
        _refuse(param, "must be an object")
    given = {key: wanted for key, wanted in value.items() if wanted is not None and wanted is not False}
    unknown = given.keys() - _PARSERS.keys() - {"json_object"}
    if unknown:
        _refuse(f"{param}.{min(map(str, unknown))[:64]}", "is not supported")
    if len(given) != 1:
        _refuse(param, f"must have exactly one of {', '.join(_PARSERS)}, json_object")
    (key, wanted) = next(iter(given.items()))
    if key == "json_object":
        if wanted is not True:
            _refuse(f"{param}.json_object", "must be true or false")
        return json_schema({"type": "object"}, f"{param}.json_object")
    return _PARSERS[key](wanted, f"{param}.{key}")


def json_schema(schema: Mapping[str, Any], param: str, *, lenient: bool = False) -> Constraint:
    """Any instance of `schema`. lenient: leave out what cannot be enforced."""
    # In place of options for the library that the client may have set.
    options = {"whitespace_pattern": _WHITE_SPACE, "lenient": lenient}
    return _constraint("json_schema", json_text({**schema, "x-guidance": options}, param), param)


def json_text(value: Any, param: str) -> str:
    """As JSON. Raises InvalidRequest beyond 254 levels: what reads it later may recurse."""
    try:
        return orjson.dumps(value).decode()
    except orjson.JSONEncodeError as exc:
        raise InvalidRequest(f"{param} is nested too deeply", param=param) from exc


def lark_text(text: str) -> str:
    """`text` as a literal of a Lark grammar, whose lexer takes no control characters as they are."""
    return json.dumps(text, ensure_ascii=False).replace("\x7f", r"\u007f")


def _constraint(kind: Any, text: str, param: str) -> Constraint:
    if len(text) > MAX_GRAMMAR_CHARS:
        _refuse(param, f"must have at most {MAX_GRAMMAR_CHARS} characters")
    return Constraint(Grammar(kind=kind, text=text), param)


def _refuse(at: str, why: str) -> NoReturn:
    raise InvalidRequest(f"{at} {why}", param=at)

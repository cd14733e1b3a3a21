"""The four forms of a completion prompt to one: a list of prompts, each text or token ids."""

from __future__ import annotations

from typing import Any, NoReturn

from shared.errors import InvalidRequest

Prompt = str | list[int]

_FORMS = "must be text, a list of texts, a list of token ids, or a list of lists of token ids"


def parse_prompts(value: Any, max_prompts: int) -> list[Prompt]:
    """Raises InvalidRequest for another form, for an empty prompt, and for too many of them.

    A text that has no tokens is only seen when it is tokenised. Ids are only known to be integers here.
    """
    if isinstance(value, str):
        return [_text(value, "prompt")]
    if not isinstance(value, list):
        _refuse(_FORMS)
    if not value:
        _refuse("is missing or empty")
    kinds = set(map(type, value))
    if kinds == {int}:
        return [value]
    if len(value) > max_prompts:
        _refuse(f"has {len(value)} prompts; at most {max_prompts} are allowed in one request")
    if kinds == {str}:
        return [_text(text, f"prompt[{position}]") for position, text in enumerate(value)]
    if kinds != {list}:
        _refuse(_FORMS)
    return [_ids(ids, f"prompt[{position}]") for position, ids in enumerate(value)]


def _text(value: str, at: str) -> str:
    if not value:
        _refuse("is empty", at)
    return value


def _ids(value: list[Any], at: str) -> list[int]:
    if not value:
        _refuse("is empty", at)
    if set(map(type, value)) != {int}:
        _refuse("must be a list of token ids", at)
    return value


def _refuse(why: str, at: str = "prompt") -> NoReturn:
    raise InvalidRequest(f"{at} {why}", param=at)

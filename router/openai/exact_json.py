"""JSON text to Python values whose numbers are written again as they were spelled.

A model's history shows what the model wrote: an id of 30 digits or a price of 1.10 must come back with its digits.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from typing import Any, NoReturn

from router.text.template import SpelledNumber

_SURROGATE = re.compile(r"\\u[dD][89a-fA-F]")


def loads(text: str) -> Any:
    """The value of `text`. Raises ValueError if it is no JSON; NaN, infinities and halves of characters
    are none."""
    try:
        value = json.loads(
            text, parse_int=_exact(int), parse_float=_exact(float), parse_constant=_refuse_constant
        )
        if _SURROGATE.search(text):
            json.dumps(value, ensure_ascii=False).encode()  # a lone one is no text: UnicodeEncodeError
    except RecursionError as exc:
        raise ValueError("nested too deeply") from exc
    return value


def _exact(parse: Callable[[str], int | float]) -> Callable[[str], int | float]:
    """Plain numbers where they are written as they were read, which is nearly always."""

    def number(text: str) -> int | float:
        try:
            plain = parse(text)
            return plain if repr(plain) == text else SpelledNumber(text)
        except ValueError:  # Python refuses integers of thousands of digits
            return SpelledNumber(text)

    return number


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no JSON")

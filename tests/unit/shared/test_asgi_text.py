"""Text from outside, made safe for where it goes."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from shared.asgi.text import one_line_json

TEXT = st.text(st.characters(exclude_categories=["Cs"]))


@given(st.dictionaries(TEXT, TEXT))
def test_json_of_one_line_is_one_line_for_every_reader(content: dict[str, str]) -> None:
    """Also for those that split at U+0085, U+2028 and U+2029, as httpx does: they broke events in two."""
    line = one_line_json(content | {"ends": "a\u0085b\u2028c\u2029d"}).decode()

    assert content | {"ends": "a\u0085b\u2028c\u2029d"} == json.loads(line)
    assert 1 == len(line.splitlines())

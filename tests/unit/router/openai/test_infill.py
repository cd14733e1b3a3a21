"""suffix: the fill-in-the-middle form, or a clear refusal."""

from __future__ import annotations

from pathlib import Path

import pytest
from tokenizers import AddedToken, Tokenizer

from router.openai.infill import MIDDLE, PREFIX, SUFFIX, fill_in_the_middle
from router.text.tokenizer import TextTokenizer
from shared.errors import InvalidRequest
from tests.support.tiny_tokenizer import write_tiny_tokenizer


def test_prefix_suffix_and_middle_stand_where_code_models_expect_them(tmp_path: Path) -> None:
    """The prompt's ids stay as they are."""
    write_tiny_tokenizer(tmp_path)
    raw = Tokenizer.from_file(str(tmp_path / "tokenizer.json"))
    raw.add_tokens([AddedToken(text, special=False, normalized=False) for text in (PREFIX, SUFFIX, MIDDLE)])
    coder = TextTokenizer(raw)
    before = coder.encode("def add(a, b):\n    return ")

    ids = fill_in_the_middle(coder, before, "\n\nprint(add(1, 2))")

    text = coder.decode(ids, skip_special=False)
    assert f"{PREFIX}def add(a, b):\n    return {SUFFIX}\n\nprint(add(1, 2)){MIDDLE}" == text
    assert before == ids[1 : 1 + len(before)]


def test_a_tokenizer_without_the_tokens_is_a_clear_refusal(tokenizer: TextTokenizer) -> None:
    """An editor must not get nonsense."""
    with pytest.raises(InvalidRequest, match="suffix is not supported"):
        fill_in_the_middle(tokenizer, [1], "x")

"""The lower bound of a text's tokens: never above the truth, and near enough to be of use."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import AddedToken, Tokenizer
from tokenizers.normalizers import NFC, Lowercase
from tokenizers.pre_tokenizers import Sequence, Whitespace

from router.text.token_bound import TokenBound
from router.text.tokenizer import TextTokenizer, byte_alphabet

JOINED = ["e\u0301", "\u1112\u1161\u11ab", "\u03b1\u0313\u0301\u0345"]  # shorter once they are normalised
PARTS = [*JOINED, "a", "7", "  ", "\n", "法国", "😀", "<|im_end|>"]


@settings(max_examples=60, deadline=None)
@given(
    st.lists(st.sampled_from([*PARTS, "capital", "\u0301", "\u0e01", "="]), max_size=40), st.integers(1, 3)
)
def test_it_is_never_above_the_truth(tokenizer: TextTokenizer, parts: list[str], times: int) -> None:
    """Also for text that its normaliser makes shorter, and for control strings either way."""
    text = "".join(parts) * times
    bound = tokenizer.at_least(text, enough=0)

    assert bound <= len(tokenizer.encode(text))
    assert bound <= len(tokenizer.encode(text, allow_special=False))


@pytest.mark.parametrize(
    "part", ["e\u0301", "\u1112\u1161\u11ab", "=", "法", "The capital of France. ", "\u0e01"]
)
def test_long_texts_are_counted_in_pieces_without_counting_too_much(
    tokenizer: TextTokenizer, part: str
) -> None:
    """Pieces are cut where a character cannot be joined with the one before."""
    text = part * (150_000 // len(part))
    num_tokens = len(tokenizer.encode(text))

    assert num_tokens // 20 <= tokenizer.at_least(text, enough=len(text)) <= num_tokens


def test_digits_are_counted_exactly(tokenizer: TextTokenizer) -> None:
    """Each is a token of its own in this kind of tokenizer."""
    assert 1000 == pytest.approx(tokenizer.at_least("7" * 1000, enough=0), rel=0.01)


def test_counting_ends_where_it_is_enough(tokenizer: TextTokenizer) -> None:
    """The rest of a text of any length costs nothing, and neither does a text that cannot be too long."""
    assert 100 < tokenizer.at_least("1" * 4_000_000, enough=100) <= 65_536 + 1
    assert 0 == tokenizer.at_least("1" * 100, enough=400)


def test_tokenizers_that_may_drop_text_have_no_bound(tokenizer: TextTokenizer) -> None:
    """Nothing is claimed of what is not known to keep every byte."""
    source = tokenizer._tokenizer.to_str()
    tokenizers = [Tokenizer.from_str(source) for _ in range(3)]
    tokenizers[0].normalizer = Lowercase()
    tokenizers[1].pre_tokenizer = Sequence([Whitespace(), tokenizers[1].pre_tokenizer])
    tokenizers[2].add_tokens([AddedToken("<pad>", lstrip=True)])

    assert [0, 0, 0] == [TokenBound(t, byte_alphabet()).at_least("7" * 1000, 0) for t in tokenizers]
    assert isinstance(Tokenizer.from_str(source).normalizer, NFC)

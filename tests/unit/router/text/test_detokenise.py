"""Incremental detokenising: whole characters, once, in time."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer

from router.text.detokenise import IncrementalDetokeniser
from router.text.tokenizer import TextTokenizer

HARD = "😀👨‍👩‍👧‍👦🇨🇭 你好，世界 𠮷 नमस्ते ẞ"


def pieces_of(tokenizer: TextTokenizer, ids: list[int], prompt: list[int] | None = None) -> list[str]:
    """The delta of each token."""
    detokeniser = IncrementalDetokeniser(tokenizer, prompt or [])
    return [detokeniser.push(token_id) for token_id in ids]


@settings(deadline=None)
@given(text=st.text())
def test_text_streams_without_replacement_characters(tokenizer: TextTokenizer, text: str) -> None:
    """Deltas of any text join to the decoding of its ids."""
    ids = tokenizer.encode(text, allow_special=False)

    assert tokenizer.decode(ids) == "".join(pieces_of(tokenizer, ids))


@settings(deadline=None)
@given(data=st.data())
def test_any_ids_join_to_the_librarys_decoding(tokenizer: TextTokenizer, data: st.DataObject) -> None:
    """Deltas of any ids, invalid bytes included, join to what the tokenizers library decodes, up to a cut end."""
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    whole: str = tokenizer._tokenizer.decode(ids, skip_special_tokens=True)
    streamed = "".join(pieces_of(tokenizer, ids))

    assert streamed == whole or streamed + "\ufffd" == whole


def test_hard_characters_come_whole(tokenizer: TextTokenizer) -> None:
    """No delta of emoji, flags, joiners and rare scripts holds U+FFFD."""
    pieces = pieces_of(tokenizer, tokenizer.encode(HARD))

    assert HARD == "".join(pieces)
    assert not any("\ufffd" in piece for piece in pieces)


def test_each_token_is_emitted_at_once(tokenizer: TextTokenizer) -> None:
    """A token that ends a character is not held back, so ASCII comes token by token."""
    ids = tokenizer.encode("The capital of France is Paris.")

    assert [tokenizer.decode([token_id]) for token_id in ids] == pieces_of(tokenizer, ids)


@pytest.mark.parametrize("cut", range(1, 4))
def test_a_character_begun_by_the_prompt_is_completed(tokenizer: TextTokenizer, cut: int) -> None:
    """When the prompt ends inside a character, the token that completes it gives the whole character."""
    by_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    ids = [by_byte[bytes([byte])] for byte in "𠮷".encode()]
    prompt = tokenizer.encode("Hi ") + ids[:cut]

    assert "𠮷" == "".join(pieces_of(tokenizer, ids[cut:], prompt))


def test_leading_spaces_stay(tokenizer: TextTokenizer) -> None:
    """The first token keeps its space, and white space alone comes through."""
    ids = tokenizer.encode(" Paris\n\t\t \n")

    assert " Paris\n\t\t \n" == "".join(pieces_of(tokenizer, ids, tokenizer.encode("It is")))


def test_a_cut_character_at_the_end_is_not_damage(tokenizer: TextTokenizer) -> None:
    """A character that the length limit cut leaves no U+FFFD; a character that is really wrong does."""
    by_byte = {tokenizer.token_bytes(i): i for i in range(tokenizer.vocab_size)}
    first = by_byte["𠮷".encode()[:1]]

    assert "" == "".join(pieces_of(tokenizer, [first]))
    assert "\ufffda" == "".join(pieces_of(tokenizer, [first, by_byte[b"a"]]))


def test_special_tokens_have_no_text_unless_kept(tokenizer: TextTokenizer) -> None:
    """Special tokens are silent, or spelled out on request."""
    ids = tokenizer.encode("a<|im_end|>b")
    kept = IncrementalDetokeniser(tokenizer, keep_special=True)

    assert ["a", "", "b"] == pieces_of(tokenizer, ids)
    assert ["a", "<|im_end|>", "b"] == [kept.push(token_id) for token_id in ids]


@pytest.mark.real
@pytest.mark.timeout(900)
def test_real_tokenizer_agrees(real_folder: Path) -> None:
    """The real tokenizer streams hard text whole and decodes as the library does."""
    real = TextTokenizer.load(real_folder)
    ids = real.encode(HARD + "\n\n    return x  # ok")

    assert Tokenizer.from_file(str(real_folder / "tokenizer.json")).decode(ids) == "".join(
        pieces_of(real, ids)
    )

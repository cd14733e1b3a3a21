"""The tokenizer wrapper: ids as transformers has them, bytes of every token, control strings by choice."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer, decoders

from router.text.tokenizer import BadTokenizer, TextTokenizer

TEXTS = [
    "",
    " ",
    "Hello, world",
    "  indented\n\tcode\r\n",
    "你好，世界 😀👨‍👩‍👧‍👦🇨🇭 𠮷 नमस्ते ẞ",
    "e\u0301",
    "it's 1234",
]


@settings(deadline=None)
@given(text=st.text())
def test_text_comes_back(tokenizer: TextTokenizer, text: str) -> None:
    """Encoding and decoding give the normalised text back, with and without control strings allowed."""
    normal = Tokenizer.from_str(tokenizer._tokenizer.to_str()).normalizer.normalize_str(text)

    assert normal == tokenizer.decode(tokenizer.encode(text), skip_special=False)
    assert normal == tokenizer.decode(tokenizer.encode(text, allow_special=False))


def test_ids_equal_the_library(tiny_folder: Path, tokenizer: TextTokenizer) -> None:
    """Ids are those of the bare tokenizers library."""
    oracle = Tokenizer.from_file(str(tiny_folder / "tokenizer.json"))
    expected = [oracle.encode(text).ids for text in TEXTS]

    assert expected == [tokenizer.encode(text) for text in TEXTS]
    assert expected == [tokenizer.encode(text, add_bos=True) for text in TEXTS]


def test_empty_text_has_no_ids(tokenizer: TextTokenizer) -> None:
    """Without a BOS token an empty string is zero tokens."""
    assert [] == tokenizer.encode("", add_bos=True)


@pytest.mark.parametrize("control", ["<|im_end|>", "<|endoftext|>", "<tool_call>"])
def test_control_strings_are_tokens_only_where_allowed(tokenizer: TextTokenizer, control: str) -> None:
    """A control string is its one token in a raw prompt, and ordinary text where that is not allowed."""
    control_id = tokenizer.control_ids[control]
    plain = tokenizer.encode(control, allow_special=False)

    assert [control_id] == tokenizer.encode(control)
    assert not set(plain) & set(tokenizer.control_ids.values())
    assert control == tokenizer.decode(plain)


def test_plain_encoding_equals_a_tokenizer_without_added_tokens(tokenizer: TextTokenizer) -> None:
    """Encoding without control tokens is what the same tokenizer does when it has none."""
    content = json.loads(tokenizer._tokenizer.to_str()) | {"added_tokens": []}
    oracle = Tokenizer.from_str(json.dumps(content))
    text = "hi<|im_end|>\n<|im_start|>system\nReply <tool_call> 你好<|im_end|>"

    assert oracle.encode(text).ids == tokenizer.encode(text, allow_special=False)


def test_bytes_of_tokens_join_to_the_text(tokenizer: TextTokenizer) -> None:
    """The bytes of the tokens, joined, are the text's UTF-8, also where tokens split characters."""
    text = TEXTS[4]

    assert text.encode() == b"".join(map(tokenizer.token_bytes, tokenizer.encode(text)))


def test_text_of_a_token_can_be_told_apart(tokenizer: TextTokenizer) -> None:
    """Partial characters show their bytes, special tokens their name, unknown ids their number."""
    partial = next(i for i in tokenizer.encode("𠮷") if len(tokenizer.token_bytes(i)) < 4)

    assert "\\x" in tokenizer.text_of(partial)
    assert "<|im_end|>" == tokenizer.text_of(tokenizer.control_ids["<|im_end|>"])
    assert f"token_id:{tokenizer.vocab_size}" == tokenizer.text_of(tokenizer.vocab_size)
    assert b"" == tokenizer.token_bytes(tokenizer.vocab_size)


def test_special_tokens_are_no_text(tokenizer: TextTokenizer) -> None:
    """Decoding leaves special tokens out, tags that are single tokens stay."""
    ids = tokenizer.encode("a<|im_end|><tool_call>b")

    assert "a<tool_call>b" == tokenizer.decode(ids)
    assert "a<|im_end|><tool_call>b" == tokenizer.decode(ids, skip_special=False)


def test_threads_may_share_it(tokenizer: TextTokenizer) -> None:
    """Threads that encode at once get what one thread gets."""
    expected = [tokenizer.encode(text) for text in TEXTS]
    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(tokenizer.encode, TEXTS * 8))

    assert expected * 8 == answers


def test_unusable_tokenizers_are_refused(tmp_path: Path, tokenizer: TextTokenizer) -> None:
    """A missing, broken or not byte-level tokenizer stops the start with one clear line."""
    with pytest.raises(BadTokenizer, match="does not exist"):
        TextTokenizer.load(tmp_path)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(BadTokenizer, match=r"tokenizer\.json"):
        TextTokenizer.load(tmp_path)
    other = Tokenizer.from_str(tokenizer._tokenizer.to_str())
    other.decoder = decoders.Fuse()
    with pytest.raises(BadTokenizer, match="byte-level"):
        TextTokenizer(other)

"""An echoed prompt: its text is its tokens' text, whatever the tokens are."""

from __future__ import annotations

from router.text.choice import ChoiceText
from router.text.echo import TOKENS_PER_PIECE, Echo
from router.text.stop import StopSet
from router.text.tokenizer import TextTokenizer
from shared.wire import Logprobs, TokenOut


def test_tokens_join_to_the_text_at_running_offsets(tokenizer: TextTokenizer) -> None:
    """Also over special tokens, and over characters of several tokens; only the first has no logprob."""
    prompt = "<|im_start|>user\n1. Zoë 𠮷 has 20 🚀🚀\n" * 40
    ids = tokenizer.encode(prompt)
    scores = [Logprobs(token=-float(i), top=[(i, -1.0)]) for i in range(1, len(ids))]
    echo = Echo(tokenizer, ids)

    pieces = list(echo.pieces(scores))

    entries = [entry for piece in pieces for entry in piece.entries]
    assert prompt == echo.text == "".join(piece.text for piece in pieces)
    assert prompt == "".join(entry.text for entry in entries)
    assert ids == [entry.token_id for entry in entries]
    assert [None, *(-float(i) for i in range(1, len(ids)))] == [entry.logprob for entry in entries]
    offset = 0
    for entry in entries:
        assert offset == entry.offset
        offset = entry.end
    assert max(len(piece.entries) for piece in pieces) <= TOKENS_PER_PIECE


def test_without_scores_it_is_one_piece_of_text(tokenizer: TextTokenizer) -> None:
    """No entries then."""
    (piece,) = Echo(tokenizer, tokenizer.encode("Hello world")).pieces(None)

    assert ("Hello world", ()) == (piece.text, piece.entries)


def test_a_character_left_unfinished_belongs_to_the_completion(tokenizer: TextTokenizer) -> None:
    """Prompt and completion together have it once."""
    ids = [tokenizer.encode(c)[0] for c in "ab"] + _bytes_of(tokenizer, "𠮷")
    for cut in range(2, len(ids)):
        echo = Echo(tokenizer, ids[:cut])
        choice = ChoiceText(tokenizer, ids[:cut], StopSet(), offset=len(echo.text))
        rest = [choice.push(TokenOut(choice=0, token_id=token_id)).text for token_id in ids[cut:]]

        assert "ab𠮷" == echo.text + "".join(rest)


def _bytes_of(tokenizer: TextTokenizer, character: str) -> list[int]:
    by_bytes = {tokenizer.token_bytes(token_id): token_id for token_id in range(tokenizer.vocab_size)}
    return [by_bytes[bytes([byte])] for byte in character.encode()]

"""How many tokens a text has at least, without tokenising it: certain, and about a hundred times faster.

Every byte of a text ends up in one token. A byte whose longest token has k bytes is at least 1/k of a token, since
no token's bytes add up to more than one in this way. So the sum over all bytes is at most the number of tokens:
a fifth of it for English, all of it for digits.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from tokenizers import Tokenizer
from tokenizers.normalizers import NFC

_PIECE = 65_536  # characters
# Before these, NFC never joins a character with what stands before it, so a text may be cut there.
_CUT = re.compile("[\\x00-\u02ff\u0370-\u0482\u3041-\u3096\u30a1-\u30fa\u4e00-\u9fff\uac00-\ud7a3]")
_SAMPLE = " a  b\n\n\tc\r\n1,.;-_(\u00a0\u4e00\u3042)\u0416'"


class TokenBound:
    """Of one tokenizer. Thread-safe. Knows nothing of a kind of tokenizer that may drop text: 0 then."""

    def __init__(self, tokenizer: Tokenizer, alphabet: dict[str, int]) -> None:
        """alphabet: the byte that each character of a vocabulary entry stands for."""
        self._normalizer = tokenizer.normalizer
        self._shares = tuple(_shares(tokenizer, alphabet)) if _keeps_all_text(tokenizer) else ()

    def at_least(self, text: str, enough: int) -> int:
        """A lower bound of the number of tokens of `text`; counted no further than just beyond `enough`."""
        if 4 * len(text) <= enough:  # a byte each is the most, and four bytes a character
            return 0
        total = 0.0
        for piece in self._pieces(text):
            content = piece.encode()
            for share, others in self._shares:
                total += share * len(content.translate(None, others))
            if total > enough + 1:
                break
        return max(0, int(total - 1e-6 * total))  # sums of fractions are not exact

    def _pieces(self, text: str) -> Iterator[str]:
        """All of `text` as the tokenizer sees it."""
        begin = 0
        while begin < len(text):
            cut = _CUT.search(text, begin + _PIECE)
            end = len(text) if cut is None else cut.start()
            piece = text[begin:end]
            begin = end
            yield (
                piece
                if self._normalizer is None or piece.isascii()
                else self._normalizer.normalize_str(piece)
            )


def _keeps_all_text(tokenizer: Tokenizer) -> bool:
    """Only what is known to turn every byte into part of a token."""
    added = tokenizer.get_added_tokens_decoder().values()
    if any(token.lstrip or token.rstrip for token in added):
        return False
    if not isinstance(tokenizer.normalizer, NFC | None) or tokenizer.pre_tokenizer is None:
        return False
    parts = tokenizer.pre_tokenizer.pre_tokenize_str(_SAMPLE)
    return sum(len(part) for part, _ in parts) >= len(_SAMPLE.encode())


def _shares(tokenizer: Tokenizer, alphabet: dict[str, int]) -> Iterator[tuple[float, bytes]]:
    """1/k, and all bytes except those whose longest token has k bytes; bytes that no token has are in none."""
    entries: dict[int, list[str]] = {}
    for entry in tokenizer.get_vocab(with_added_tokens=False):
        entries.setdefault(len(entry), []).append(entry)
    longest: dict[int, int] = {}
    for length in sorted(entries, reverse=True):
        for character in set("".join(entries[length])):
            if character in alphabet:
                longest.setdefault(alphabet[character], length)
    for token in tokenizer.get_added_tokens_decoder().values():
        content = token.content.encode()
        longest |= {byte: max(longest.get(byte, 0), len(content)) for byte in content}
    for length in sorted(set(longest.values())):
        yield 1 / length, bytes(byte for byte in range(256) if longest.get(byte) != length)

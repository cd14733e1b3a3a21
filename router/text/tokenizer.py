"""A checkpoint's tokenizer: text to token ids, token ids to the exact bytes they stand for.

In: tokenizer.json of a byte-level BPE (Qwen2 and its kin). Out: ids and bytes. Which text is asked for, and
what a conversation looks like as text, is none of its business. All methods may be called from any thread.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from pathlib import Path

from tokenizers import Tokenizer
from tokenizers.decoders import ByteLevel

from router.text.token_bound import TokenBound


class BadTokenizer(ValueError):
    """The checkpoint's tokenizer is missing, broken, or of a kind that has no bytes for each token."""


def byte_alphabet() -> dict[str, int]:
    """The character that byte-level BPE writes for each byte, and the byte.

    Source: GPT-2's encoder; printable Latin-1 stands for itself, the rest is moved up to U+0100 and after.
    """
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    moved = [byte for byte in range(0x100) if byte not in plain]
    alphabet = {chr(byte): byte for byte in plain}
    alphabet.update((chr(0x100 + position), byte) for position, byte in enumerate(moved))
    return alphabet


def any_text(texts: Iterable[str]) -> re.Pattern[str]:
    """Matches any of `texts`, the longest first; nothing if there are none."""
    wanted = sorted(texts, key=len, reverse=True)
    return re.compile("|".join(map(re.escape, wanted)) if wanted else r"(?!)")


class TextTokenizer:
    """Wraps `tokenizers.Tokenizer`. "Control" tokens are the added ones, "special" those that are never text.

    special_ids: tokens that produce no text in an answer (<|im_end|>, ...).
    control_ids: text -> id of every added token, the special ones included.
    """

    def __init__(self, tokenizer: Tokenizer) -> None:
        if not isinstance(tokenizer.decoder, ByteLevel):
            raise BadTokenizer("only byte-level tokenizers are supported")
        tokenizer.no_truncation()
        tokenizer.no_padding()
        added = tokenizer.get_added_tokens_decoder()
        self._tokenizer = tokenizer
        self._plain = _without_added_tokens(tokenizer)
        self._alphabet = byte_alphabet()
        self._bound = TokenBound(tokenizer, self._alphabet)
        self._bytes = {token_id: token.content.encode() for token_id, token in added.items()}
        self.vocab_size: int = tokenizer.get_vocab_size(with_added_tokens=True)
        self.special_ids = frozenset(token_id for token_id, token in added.items() if token.special)
        self.control_ids = {token.content: token_id for token_id, token in added.items()}

    @classmethod
    def load(cls, folder: Path) -> TextTokenizer:
        """Read `folder`/tokenizer.json; up to a second for a vocabulary of 150,000. Raises BadTokenizer."""
        path = folder / "tokenizer.json"
        if not path.is_file():
            raise BadTokenizer(f"{path} does not exist")
        try:
            tokenizer = Tokenizer.from_file(str(path))
        except Exception as exc:  # the library raises bare Exception
            raise BadTokenizer(f"{path}: {exc}") from exc
        return cls(tokenizer)

    @property
    def bos_ids(self) -> list[int]:
        """What `encode` puts before a text if `add_bos` asks for it; empty without such a token."""
        plain, whole = self.encode("a"), self.encode("a", add_bos=True)
        return whole[: whole.index(plain[0])]

    @property
    def special_texts(self) -> frozenset[str]:
        """Texts of the special tokens."""
        return frozenset(text for text, token_id in self.control_ids.items() if token_id in self.special_ids)

    def encode(self, text: str, *, allow_special: bool = True, add_bos: bool = False) -> list[int]:
        """Token ids of `text`; none for "" unless the tokenizer has a BOS token and `add_bos` asks for it.

        allow_special: control strings become their one token, as in a hand-written prompt; else they are
            ordinary text, whatever they look like.
        """
        tokenizer = self._tokenizer if allow_special else self._plain
        # NOTE: the library's `encode` holds the GIL until it is through, seconds for a megabyte; this does not.
        [encoding] = tokenizer.encode_batch_fast([text], add_special_tokens=allow_special and add_bos)
        ids: list[int] = encoding.ids
        return ids

    def at_least(self, text: str, *, enough: int) -> int:
        """Certainly no more tokens than `text` has, found quickly; counted no further than just beyond `enough`."""
        return self._bound.at_least(text, enough)

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes that the token adds to a text, or its name if it is special; b"" for an id without token."""
        known = self._bytes.get(token_id)
        if known is None:
            known = self._bytes[token_id] = self._spell(token_id)
        return known

    def text_of(self, token_id: int) -> str:
        r"""The token's own text; bytes that are no whole character appear as \xf0, an unknown id by number."""
        content = self.token_bytes(token_id)
        return content.decode("utf-8", "backslashreplace") if content else f"token_id:{token_id}"

    def decode(self, token_ids: Iterable[int], *, skip_special: bool = True) -> str:
        """The text of `token_ids` as a whole; U+FFFD where the bytes are no UTF-8."""
        hidden = self.special_ids if skip_special else frozenset()
        return b"".join(self.token_bytes(i) for i in token_ids if i not in hidden).decode("utf-8", "replace")

    def control_pattern(self) -> re.Pattern[str]:
        """Matches the control strings of a text as `encode` reads them."""
        return any_text(self.control_ids)

    def _spell(self, token_id: int) -> bytes:
        token = self._tokenizer.id_to_token(token_id)
        if token is None:
            return b""
        try:
            return bytes(self._alphabet[character] for character in token)
        except KeyError:
            return token.encode()


def _without_added_tokens(tokenizer: Tokenizer) -> Tokenizer:
    """The same steps over the same vocabulary, which is shared, except that control strings are ordinary text."""
    plain = Tokenizer(tokenizer.model)
    if tokenizer.normalizer is not None:
        plain.normalizer = tokenizer.normalizer
    if tokenizer.pre_tokenizer is not None:
        plain.pre_tokenizer = tokenizer.pre_tokenizer
    return plain

"""Incremental detokenising: token ids in, text that later tokens cannot change out.

A byte-level token is bytes, so the text so far is a UTF-8 stream: an incremental decoder holds back at most the
three bytes of an unfinished character, and each token costs only its own length.
"""

from __future__ import annotations

import codecs
from collections.abc import Sequence

from router.text.tokenizer import TextTokenizer

_LONGEST_CHARACTER = 4  # bytes, in UTF-8


class IncrementalDetokeniser:
    """Text of one choice. Special tokens have none, unless `keep_special`.

    prompt_ids: what came before. Only a character that they leave unfinished matters: the first tokens that
        complete it produce it whole. Leading spaces are part of the token's own bytes and stay.
    The deltas, joined, are the decoding of all ids, less an unfinished character at the very end: its bytes are
    not wrong, only cut, so there is nothing to flush and no U+FFFD for them.
    """

    def __init__(
        self, tokenizer: TextTokenizer, prompt_ids: Sequence[int] = (), *, keep_special: bool = False
    ) -> None:
        self._tokenizer = tokenizer
        self._hidden = frozenset() if keep_special else tokenizer.special_ids
        self._decoder = codecs.getincrementaldecoder("utf-8")(errors="replace")
        self._decoder.decode(self._tail(prompt_ids))

    def push(self, token_id: int) -> str:
        """The text that this token completes; "" while it only begins or continues a character."""
        if token_id in self._hidden:
            return ""
        return self._decoder.decode(self._tokenizer.token_bytes(token_id))

    def _tail(self, prompt_ids: Sequence[int]) -> bytes:
        """The last bytes of the prompt, enough to hold any unfinished character."""
        tail = b""
        for token_id in reversed(prompt_ids):
            if token_id in self._hidden:
                continue
            tail = self._tokenizer.token_bytes(token_id) + tail
            if len(tail) >= _LONGEST_CHARACTER:
                break
        return tail[-_LONGEST_CHARACTER:]

"""A prompt as part of its own answer: its text, and its tokens with their logprobs.

The text is the tokens' own, special ones included, so tokens join to it. A character that the prompt leaves
unfinished belongs to the completion, whose first tokens complete it.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from router.text.choice import Piece, TokenEntry
from router.text.detokenise import IncrementalDetokeniser
from router.text.tokenizer import TextTokenizer
from shared.wire import Logprobs

TOKENS_PER_PIECE = 256
"""Bounds one event of a stream; a piece without logprobs has no need to be cut."""


class Echo:
    """Of one prompt, shared by all its choices."""

    def __init__(self, tokenizer: TextTokenizer, token_ids: Sequence[int]) -> None:
        detokeniser = IncrementalDetokeniser(tokenizer, keep_special=True)
        self._token_ids = token_ids
        self._texts = [detokeniser.push(token_id) for token_id in token_ids]
        self.text = "".join(self._texts)

    def pieces(self, scores: Sequence[Logprobs] | None) -> Iterator[Piece]:
        """scores: of every token but the first, which has none; None if they were not asked for."""
        if scores is None:
            yield Piece(self.text)
            return
        entries: list[TokenEntry] = []
        offset = 0
        for position, (token_id, text) in enumerate(zip(self._token_ids, self._texts, strict=True)):
            score = scores[position - 1] if position else None
            entries.append(
                TokenEntry(token_id, text, offset, score.token if score else None, score.top if score else ())
            )
            offset += len(text)
            if len(entries) == TOKENS_PER_PIECE or position == len(self._texts) - 1:
                yield Piece("".join(entry.text for entry in entries), tuple(entries))
                entries.clear()

"""Token entries of a choice to the two logprob shapes of the API. Every number is finite, so it is JSON.

Completions: four lists of one length; `tokens` are what each token added to the text, so that they join to it
(of a token that a stop string cut, the part that is left), and `text_offset` is where. There is an entry for
every token that usage counts; the first token of an echoed prompt has null for its logprob. Chat: one object per
token with its own exact bytes, none for an end token; tokens that are no text (an end token that was ignored)
have no bytes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from router.text.choice import TokenEntry
from router.text.tokenizer import TextTokenizer

LOWEST = -9999.0


def finite(logprob: float) -> float:
    """As it is, but no lower than LOWEST, which also stands for a token that cannot come."""
    return max(logprob, LOWEST) if math.isfinite(logprob) else LOWEST


def completion_logprobs(
    entries: Sequence[TokenEntry], tokenizer: TextTokenizer, *, by_id: bool = False
) -> dict[str, list[Any]]:
    """tokens, token_logprobs, top_logprobs, text_offset. by_id: tokens are named token_id:N."""
    return {
        "tokens": [_by_id(entry.token_id) if by_id else entry.text for entry in entries],
        "token_logprobs": [None if entry.logprob is None else finite(entry.logprob) for entry in entries],
        "top_logprobs": [_best(entry, tokenizer, by_id=by_id) for entry in entries],
        "text_offset": [entry.offset for entry in entries],
    }


def chat_logprobs(
    entries: Sequence[TokenEntry], tokenizer: TextTokenizer, *, by_id: bool = False
) -> dict[str, Any]:
    """content: token, bytes, logprob and top_logprobs of each. by_id: tokens are named token_id:N."""
    return {"content": [_entry(entry, tokenizer, by_id=by_id) for entry in entries], "refusal": None}


def _by_id(token_id: int) -> str:
    return f"token_id:{token_id}"


def _best(entry: TokenEntry, tokenizer: TextTokenizer, *, by_id: bool) -> dict[str, float] | None:
    """The best tokens by their text, and the chosen one under its text in `tokens`.

    Of others that look alike the best one counts, and before any that looks like the chosen one, that one does.
    """
    if entry.logprob is None:
        return None
    if by_id:
        return {_by_id(i): finite(logprob) for i, logprob in (*entry.top, (entry.token_id, entry.logprob))}
    best: dict[str, float] = {}
    for token_id, logprob in entry.top:
        text = entry.text if token_id == entry.token_id else tokenizer.text_of(token_id)
        best.setdefault(text, finite(logprob))
    best[entry.text] = finite(entry.logprob)
    return best


def _entry(entry: TokenEntry, tokenizer: TextTokenizer, *, by_id: bool) -> dict[str, Any]:
    def one(token_id: int, logprob: float) -> dict[str, Any]:
        is_text = token_id not in tokenizer.special_ids or (token_id == entry.token_id and entry.text)
        return {
            "token": _by_id(token_id) if by_id else tokenizer.text_of(token_id),
            "logprob": finite(logprob),
            "bytes": list(tokenizer.token_bytes(token_id)) if is_text else [],
        }

    return one(entry.token_id, entry.logprob or 0.0) | {"top_logprobs": [one(*best) for best in entry.top]}

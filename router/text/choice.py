"""One choice from worker tokens to client text: detokenise, match stops, keep logprobs beside their text.

In: the `TokenOut`s of one choice, in order, first token included. Out: pieces that can be sent at once and are
never taken back. Where tokens come from and which JSON the pieces end up in is none of its business.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Literal, TypeAlias

from router.text.detokenise import IncrementalDetokeniser
from router.text.stop import StopMatcher, StopSet
from router.text.tokenizer import TextTokenizer
from router.text.tools_parser import CallDelta
from shared.wire import FinishReason, TokenId, TokenOut


@dataclass(frozen=True, slots=True)
class TokenEntry:
    """One token's logprobs. text: what it added to the answer, "" while it only began a character.

    offset: where that text begins in the answer, in characters. logprob: None for a prompt's first token.
    """

    token_id: int
    text: str
    offset: int
    logprob: float | None
    top: Sequence[tuple[TokenId, float]]

    @property
    def end(self) -> int:
        """Where its text ends in the answer."""
        return self.offset + len(self.text)


Ending: TypeAlias = FinishReason | Literal["tool_calls"]


@dataclass(frozen=True, slots=True)
class Piece:
    """What one push settled. False if there is nothing to send. token_ids: all tokens since the last piece."""

    text: str = ""
    entries: tuple[TokenEntry, ...] = ()
    finish_reason: Ending | None = None
    token_ids: tuple[TokenId, ...] = ()
    calls: tuple[CallDelta, ...] = ()

    def __bool__(self) -> bool:
        return bool(self.text or self.entries or self.finish_reason or self.calls)

    @property
    def is_plain(self) -> bool:
        """Nothing but text."""
        return bool(self.text) and not (self.entries or self.finish_reason or self.calls)


_NOTHING = Piece()


class ChoiceText:
    """Joined pieces are the whole text; joined entries are one per token with text in it, in order.

    A token's entry leaves together with the end of its text. The end token has neither text nor entry, but is
    counted. Of the tokens that a stop string reaches into, the part before the stop stays; the rest is dropped.
    With `every_entry` there is an entry for every counted token, though some have no text.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        prompt_ids: Sequence[int],
        stops: StopSet,
        *,
        min_tokens: int = 0,
        include_stop: bool = False,
        every_entry: bool = False,
        offset: int = 0,
        keep_special: bool = False,
    ) -> None:
        """min_tokens: text of so many first tokens cannot be part of a stop.

        include_stop: a stop string is part of the text. offset: characters of the answer before this text.
        keep_special: special tokens have their names for a text.
        """
        self._detokeniser = IncrementalDetokeniser(tokenizer, prompt_ids, keep_special=keep_special)
        self._matcher = StopMatcher(stops, include=include_stop)
        self._min_tokens = min_tokens
        self._every_entry = every_entry
        self._waiting: deque[TokenEntry] = deque()
        self._decoded = offset  # characters
        self._emitted = offset  # characters
        self._sum_logprobs = 0.0
        self._untold_ids: list[TokenId] = []
        self.completion_tokens = 0
        self.finished = False
        self.stopped_early = False

    @property
    def mean_logprob(self) -> float:
        """Over the counted tokens, if their logprobs came along."""
        return self._sum_logprobs / max(self.completion_tokens, 1)

    def push(self, token: TokenOut) -> Piece:
        """Take the next token. After the end nothing more comes out: tokens on their way are dropped."""
        if self.finished:
            return _NOTHING
        self.completion_tokens += 1
        self._untold_ids.append(token.token_id)
        is_end = token.finish_reason == "stop"
        text = "" if is_end else self._detokeniser.push(token.token_id)
        if token.logprobs is not None:
            self._sum_logprobs += token.logprobs.token
            if not is_end or self._every_entry:
                self._waiting.append(
                    TokenEntry(token.token_id, text, self._decoded, token.logprobs.token, token.logprobs.top)
                )
        if is_end:
            return self._end("stop")
        self._decoded += len(text)
        settled = self._matcher.push(text) if self.completion_tokens > self._min_tokens else text
        if self._matcher.matched is not None:
            self.stopped_early = token.finish_reason is None
            return self._close(settled, "stop")
        if token.finish_reason is not None:
            return self._end(token.finish_reason, settled)
        if not settled:
            return _NOTHING
        self._emitted += len(settled)
        return Piece(settled, self._settled_entries(), None, self._take_ids())

    def abandon(self, reason: FinishReason) -> Piece:
        """No more tokens come although none said so: give out what was held and end."""
        return _NOTHING if self.finished else self._end(reason)

    def _end(self, reason: FinishReason, settled: str = "") -> Piece:
        text = settled + self._matcher.flush()
        return self._close(text, reason if self._matcher.matched is None else "stop")

    def _close(self, text: str, reason: FinishReason) -> Piece:
        """The last piece. A token cut by a stop keeps what lies before the cut."""
        self.finished = True
        self._emitted += len(text)
        entries = list(self._waiting)
        self._waiting.clear()
        if self._matcher.matched is not None:
            cut = self._emitted
            entries = [
                replace(e, text=e.text[: max(cut - e.offset, 0)], offset=min(e.offset, cut))
                for e in entries
                if e.offset < cut or self._every_entry
            ]
        return Piece(text, tuple(entries), reason, self._take_ids())

    def _take_ids(self) -> tuple[TokenId, ...]:
        ids = tuple(self._untold_ids)
        self._untold_ids.clear()
        return ids

    def _settled_entries(self) -> tuple[TokenEntry, ...]:
        if not self._waiting:
            return ()
        ready: list[TokenEntry] = []
        while self._waiting and self._waiting[0].end <= self._emitted:
            ready.append(self._waiting.popleft())
        return tuple(ready)


def split_stops(stops: Sequence[str], tokenizer: TextTokenizer) -> tuple[tuple[int, ...], StopSet]:
    """The end tokens and the text matcher for a client's stop strings.

    A stop that is exactly one special token can only be met as that token, which has no text, so it becomes a
    stop token; it also stays a text stop, for a model that spells it out. Raises InvalidRequest for too many.
    """
    control = tokenizer.control_ids
    ids = dict.fromkeys(control[stop] for stop in stops if control.get(stop) in tokenizer.special_ids)
    return tuple(ids), StopSet(stops)

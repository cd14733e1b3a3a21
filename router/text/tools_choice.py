"""One choice that may call tools: the plain pipeline, and what of its text are calls."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import replace

from router.text.choice import ChoiceText, Ending, Piece
from router.text.stop import StopSet
from router.text.tokenizer import TextTokenizer
from router.text.tools_grammar import OPEN
from router.text.tools_parser import CallDelta, ToolParser
from shared.wire import FinishReason, TokenId, TokenOut


class ToolChoiceText(ChoiceText):
    """As ChoiceText, but pieces have the content only, and the calls beside it.

    Logprobs stay with the tokens, whatever becomes of their text. An answer with calls ends with "tool_calls",
    unless it was cut in the middle of one, or by length.
    """

    def __init__(
        self,
        tokenizer: TextTokenizer,
        prompt_ids: Sequence[int],
        stops: StopSet,
        *,
        names: Collection[str],
        min_tokens: int = 0,
        include_stop: bool = False,
        keep_special: bool = False,
    ) -> None:
        """names: tools that may be called."""
        super().__init__(
            tokenizer,
            prompt_ids,
            stops,
            min_tokens=min_tokens,
            include_stop=include_stop,
            keep_special=keep_special or OPEN in tokenizer.special_texts,
        )
        self._parser = ToolParser(names)
        self._unsent_ids: tuple[TokenId, ...] = ()

    def push(self, token: TokenOut) -> Piece:
        """See ChoiceText."""
        return self._parsed(super().push(token))

    def abandon(self, reason: FinishReason) -> Piece:
        """See ChoiceText."""
        return self._parsed(super().abandon(reason))

    def _parsed(self, piece: Piece) -> Piece:
        if not piece:
            return piece
        parsed = self._parser.push(piece.text)
        content, calls = parsed.content, parsed.calls
        if piece.finish_reason is not None:
            content += self._parser.flush(is_cut=piece.finish_reason == "length").content
        found = replace(
            piece,
            text=content,
            calls=_joined(calls),
            finish_reason=self._ending(piece.finish_reason),
            token_ids=self._unsent_ids + piece.token_ids,
        )
        self._unsent_ids = () if found else found.token_ids
        return found

    def _ending(self, reason: Ending | None) -> Ending | None:
        whole = self._parser.num_calls > 0 and not self._parser.is_inside_call
        return "tool_calls" if reason == "stop" and whole else reason


def _joined(calls: Sequence[CallDelta]) -> tuple[CallDelta, ...]:
    """Runs of argument pieces of one call as one piece; its first piece stays by itself."""
    joined: list[CallDelta] = []
    for call in calls:
        if call.name is None and joined and joined[-1].name is None and joined[-1].index == call.index:
            joined[-1] = replace(joined[-1], arguments=joined[-1].arguments + call.arguments)
        else:
            joined.append(call)
    return tuple(joined)

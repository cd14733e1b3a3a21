"""Which tokens may come next under a grammar. Numpy and the grammar library, no torch.

A state is a pure function of (grammar, generated tokens): prefill asks it for the first token, decode rebuilds it
from the tokens so far, and a resumed choice from all that was generated. Nothing of it ever travels.
Compiling takes milliseconds and belongs on a thread of its own; a state is used by one thread at a time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLTokenizer
from numpy.typing import NDArray

from shared.errors import EngineFault, InvalidRequest
from shared.grammar import library_form, one_line, parser_limits
from shared.wire import Grammar

MAX_CACHED = 32

Mask = NDArray[np.bool_]


class GrammarCompiler:
    """Grammars for one checkpoint. Thread-safe; keeps the last few that were compiled."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self._tokenizer = tokenizer
        self._compiled: OrderedDict[Grammar, LLMatcher] = OrderedDict()
        self._lock = threading.Lock()

    @classmethod
    def load(cls, folder: Path, *, vocab_size: int, eos_token_ids: Sequence[int]) -> GrammarCompiler:
        """Read `folder`/tokenizer.json. Two seconds for 150,000 tokens, all of it holding the interpreter's lock.

        vocab_size: rows of the output layer. Rows that no token has are never allowed.
        Raises ValueError if the tokenizer is of a kind that the library does not know.
        """
        text = (folder / "tokenizer.json").read_text("utf-8")
        return cls(LLTokenizer(text, n_vocab=vocab_size, eos_token=list(eos_token_ids) or None))

    @property
    def vocab_size(self) -> int:
        """Rows of the output layer."""
        return self._tokenizer.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return tuple(self._tokenizer.eos_tokens)

    def start(self, grammar: Grammar, generated: Sequence[int] = ()) -> GrammarState:
        """The state after `generated` tokens. Raises InvalidRequest for what cannot be compiled or followed."""
        with self._lock:
            pristine = self._compiled.get(grammar)
            if pristine is not None:
                self._compiled.move_to_end(grammar)
        if pristine is None:
            pristine = self._compile(grammar)
        with self._lock:
            self._compiled[grammar] = pristine
            while len(self._compiled) > MAX_CACHED:
                self._compiled.popitem(last=False)
            state = GrammarState(pristine.deep_copy(), self._tokenizer)
        if generated and not state.advance(generated):
            raise InvalidRequest("the tokens so far do not follow the grammar", param="sampling.grammar")
        return state

    def _compile(self, grammar: Grammar) -> LLMatcher:
        try:
            matcher = LLMatcher(self._tokenizer, library_form(grammar), log_level=0, limits=parser_limits())
        except ValueError as exc:
            raise _refused(str(exc)) from exc
        # The first mask builds most of what later ones share, and shows what is too complex to be followed.
        if not matcher.is_error():
            matcher.compute_bitmask()
        if matcher.is_error():
            raise _refused(matcher.get_error())
        return matcher


class GrammarState:
    """Where one choice stands in its grammar."""

    def __init__(self, matcher: LLMatcher, tokenizer: LLTokenizer) -> None:
        self._matcher = matcher
        self._tokenizer = tokenizer
        self._allowed: Mask | None = None

    def after(self, token: int) -> GrammarState:
        """A state of its own, one token on."""
        state = GrammarState(self._matcher.deep_copy(), self._tokenizer)
        state.advance([token])
        return state

    def advance(self, tokens: Sequence[int]) -> bool:
        """Take tokens over. False if they do not follow the grammar; `allowed` raises from then on."""
        self._allowed = None
        return self._matcher.consume_tokens(list(tokens))

    def is_end(self, token: int) -> bool:
        """Is this a token that a grammar allows only to end the answer?"""
        return token in self._tokenizer.eos_tokens

    def allowed(self, unwanted: Collection[int] = ()) -> Mask:
        """One bool per row of the output layer. End tokens are allowed where the grammar may end.

        unwanted: tokens to leave out as long as others are left: a finished grammar has to end.
        Raises InvalidRequest if the grammar has become too complex, EngineFault if a token broke it.
        """
        if self._allowed is None:
            self._allowed = self._compute()
        if not unwanted:
            return self._allowed
        wanted = self._allowed.copy()
        wanted[list(unwanted)] = False
        return wanted if wanted.any() else self._allowed

    def _compute(self) -> Mask:
        broken = self._matcher.is_error()
        bits = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.uint8)
        if self._matcher.is_error():
            reason = one_line(self._matcher.get_error())
            if broken:
                raise EngineFault("a token does not follow the request's grammar")
            raise InvalidRequest(f"the grammar is too complex: {reason}", param="sampling.grammar")
        return np.unpackbits(bits, count=self._tokenizer.vocab_size, bitorder="little").view(np.bool_)


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the grammar cannot be used: {one_line(reason)}", param="sampling.grammar")

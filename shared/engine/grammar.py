"""Which tokens may come next under a grammar. Numpy and the grammar library, no torch.

A state is a pure function of (grammar, generated tokens): prefill asks it for the first token, decode rebuilds it
from the tokens so far, and a resumed choice from all that was generated. Nothing of it ever travels.
Compiling takes milliseconds and belongs on a thread of its own; a state is used by one thread at a time.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Collection, Sequence
from copy import copy
from pathlib import Path

import numpy as np
from llguidance import LLMatcher, LLParserLimits, LLTokenizer
from numpy.typing import NDArray

from shared.errors import EngineFault, InvalidRequest
from shared.grammar import library_form, one_line, parser_limits, refused
from shared.wire import Grammar

MAX_CACHED = 32
# Of text, in all. A grammar that is one long text keeps up to 1 KiB for each character.
MAX_CACHED_CHARS = 1 << 17

_IS_WRONG = "doesn't satisfy the grammar"  # how the library says that no limit is to blame

Mask = NDArray[np.bool_]


class GrammarCompiler:
    """Grammars for one checkpoint. Thread-safe; keeps the last few that were compiled."""

    def __init__(self, tokenizer: LLTokenizer) -> None:
        self.tokenizer = tokenizer
        self._compiled: OrderedDict[Grammar, CompiledGrammar] = OrderedDict()
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
        return self.tokenizer.vocab_size

    @property
    def eos_token_ids(self) -> tuple[int, ...]:
        """Tokens that end an answer."""
        return tuple(self.tokenizer.eos_tokens)

    def start(self, grammar: Grammar, generated: Sequence[int] = ()) -> GrammarState:
        """The state after `generated` tokens. Raises InvalidRequest for what cannot be compiled or followed."""
        return self.compiled(grammar).start(generated)

    def compiled(self, grammar: Grammar) -> CompiledGrammar:
        """From the cache, or compiled now. Raises InvalidRequest."""
        with self._lock:
            found = self._compiled.get(grammar)
            if found is None:
                found = self._compiled[grammar] = CompiledGrammar(self.tokenizer, grammar, parser_limits())
            self._compiled.move_to_end(grammar)
            self._forget_some()
        found.copy()
        return found

    def cached(self, grammar: Grammar) -> CompiledGrammar | None:
        """What has been compiled, and is still kept."""
        with self._lock:
            found = self._compiled.get(grammar)
            if found is None or not found.edition:
                return None
            self._compiled.move_to_end(grammar)
            return found

    def _forget_some(self) -> None:
        """All but the last few, and never the last."""
        chars = sum(len(grammar.text) for grammar in self._compiled)
        while len(self._compiled) > MAX_CACHED or (chars > MAX_CACHED_CHARS and len(self._compiled) > 1):
            grammar, _ = self._compiled.popitem(last=False)
            chars -= len(grammar.text)


class CompiledGrammar:
    """One grammar, compiled when it is first wanted. Thread-safe.

    NOTE: all copies of a matcher share what its lexer has met, and the limit of that. So a grammar that has served
    many answers can be at its limit while a new edition of it is not. edition: how often it was compiled.
    """

    def __init__(self, tokenizer: LLTokenizer, grammar: Grammar, limits: LLParserLimits) -> None:
        self.tokenizer = tokenizer
        self._grammar = grammar
        self._limits = limits
        self._pristine: LLMatcher | None = None
        self.edition = 0
        self._lock = threading.Lock()

    def copy(self, after: int = 0) -> tuple[LLMatcher, int]:
        """A matcher that has met no token, of an edition later than `after`, and which one that is.

        Whoever else shared the edition that is used up gets the new one without another compilation.
        Raises InvalidRequest if the grammar cannot be compiled.
        """
        with self._lock:
            if self._pristine is None or self.edition <= after:
                self._pristine = self._compile()
                self.edition += 1
            return self._pristine.deep_copy(), self.edition

    def start(self, generated: Sequence[int] = ()) -> GrammarState:
        """The state after `generated` tokens. Raises InvalidRequest if they do not follow."""
        state = GrammarState(self)
        if generated and not state.advance(generated):
            raise InvalidRequest(
                f"the tokens so far do not follow the grammar: {state.problem}", param="sampling.grammar"
            )
        return state

    def _compile(self) -> LLMatcher:
        beyond = refused(self._grammar)
        if beyond is not None:
            raise _refused(beyond)
        try:
            form = library_form(self._grammar)
            matcher = LLMatcher(self.tokenizer, form, log_level=0, limits=self._limits)
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

    def __init__(self, compiled: CompiledGrammar) -> None:
        self._compiled = compiled
        self._matcher, self._edition = compiled.copy()
        self._tokens: list[int] = []
        self._allowed: Mask | None = None

    def after(self, token: int) -> GrammarState:
        """A state of its own, one token on."""
        state = copy(self)
        state._matcher = self._matcher.deep_copy()
        state._tokens = list(self._tokens)
        state.advance([token])
        return state

    @property
    def problem(self) -> str:
        """Why it cannot go on, in one line."""
        return one_line(self._matcher.get_error())

    def advance(self, tokens: Sequence[int]) -> bool:
        """Take tokens over. False if they cannot follow; `allowed` raises from then on."""
        self._allowed = None
        self._tokens += tokens
        return self._matcher.consume_tokens(list(tokens)) or self._begin_anew()

    def is_end(self, token: int) -> bool:
        """Is this a token that a grammar allows only to end the answer?"""
        return token in self._compiled.tokenizer.eos_tokens

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
        was_broken = self._matcher.is_error()
        bits = self._matcher.compute_bitmask()
        if self._matcher.is_error() and not was_broken and self._begin_anew():
            bits = self._matcher.compute_bitmask()
        if self._matcher.is_error():
            if _IS_WRONG in self._matcher.get_error():
                raise EngineFault("a token does not follow the request's grammar")
            raise InvalidRequest(f"the grammar leads no further: {self.problem}", param="sampling.grammar")
        packed = np.frombuffer(bits, dtype=np.uint8)
        num_rows = self._compiled.tokenizer.vocab_size
        return np.unpackbits(packed, count=num_rows, bitorder="little").view(np.bool_)

    def _begin_anew(self) -> bool:
        """Replace a matcher whose limit others may have used up. False if its tokens cannot follow."""
        self._matcher, self._edition = self._compiled.copy(after=self._edition)
        return self._matcher.consume_tokens(self._tokens)


def _refused(reason: str) -> InvalidRequest:
    return InvalidRequest(f"the grammar cannot be used: {one_line(reason)}", param="sampling.grammar")

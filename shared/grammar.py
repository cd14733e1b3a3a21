"""Grammars as text: what a constrained answer must look like, checked without a tokenizer.

In: a `Grammar` of the wire. Out: the library's own form of it, or what is wrong with it. Which tokens a grammar
allows is shared.engine.grammar's business; how a client asks for one is the router's.
"""

from __future__ import annotations

from llguidance import LLMatcher, LLParserLimits

from shared.grammar_depth import too_deep
from shared.grammar_limits import excess
from shared.grammar_text import GrammarText, UnfitGrammar
from shared.wire import Grammar

_MAX_REASON = 300
_IN_PLAIN_WORDS = {"NoExtension": "nothing can match it", "NoExtensionBias": "nothing can match it"}
"""Of what the library has only a name for."""


def parser_limits() -> LLParserLimits:
    """What one grammar may cost: work of compiling it and of each token (tens of milliseconds), and memory.

    NOTE: they bound only a part of the work; shared.grammar_limits has the rest.
    """
    return LLParserLimits(max_lexer_states=50_000, initial_lexer_fuel=300_000, verbose_errors=False)


def refused(grammar: Grammar) -> str | None:
    """Why the library must not see this grammar: it would end the process, or work without end. None if it may."""
    try:
        text = GrammarText.read(grammar)
    except UnfitGrammar as exc:
        return str(exc)
    return too_deep(text) or excess(text)


def library_form(grammar: Grammar) -> str:
    """As llguidance reads it. Raises ValueError for a schema that is no JSON object."""
    if grammar.kind == "json_schema":
        return LLMatcher.grammar_from_json_schema(grammar.text)
    if grammar.kind == "regex":
        return LLMatcher.grammar_from_regex(grammar.text)
    return LLMatcher.grammar_from_lark(grammar.text)


def problem(grammar: Grammar) -> str | None:
    """Why nothing can follow this grammar, in one line; None if it is good.

    Milliseconds; up to some seconds for the largest, most of it with the interpreter's lock released.
    """
    beyond = refused(grammar)
    if beyond is not None:
        return beyond
    try:
        found = LLMatcher.validate_grammar(library_form(grammar), limits=parser_limits())
    except ValueError as exc:
        found = str(exc)
    return one_line(found) if found and not found.startswith("WARNING") else None


def one_line(reason: str) -> str:
    """The first line of the library's complaint, shortened: the rest draws the grammar or its state."""
    lines = reason.strip().splitlines() or ["unknown"]
    # A regex's complaint has its point in the last line ("error: unclosed group").
    told = lines[0] if not lines[-1].startswith("error: ") else f"{lines[0]} {lines[-1]}"
    return _IN_PLAIN_WORDS.get(told, told)[:_MAX_REASON]

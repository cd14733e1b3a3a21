"""The form that an answer must have: one grammar from a request's format and its tools, checked.

A call that must be made, or may be made, is made in full: its name is one of the tools', and its arguments
follow the tool's schema. Where a format is asked for as well, the answer is either calls or of that format.
"""

from __future__ import annotations

from collections.abc import Callable, Collection
from dataclasses import dataclass
from functools import lru_cache

from router.openai.requests import ChatRequest, CompletionRequest
from router.openai.structured import Constraint
from router.openai.tools import Tool, callable_tools
from router.text.tokenizer import any_text
from router.text.tools_grammar import CLOSE, OPEN, tools_grammar
from shared.errors import InvalidRequest
from shared.grammar import problem
from shared.wire import MAX_GRAMMAR_CHARS, Grammar

_MAX_REMEMBERED = 64


@dataclass(frozen=True, slots=True)
class Form:
    """grammar: None if the answer is free. field: where it came from. tool_names: tools that it may call."""

    grammar: Grammar | None = None
    field: str | None = None
    tool_names: tuple[str, ...] = ()


class FormBuilder:
    """Builds and checks. Thread-safe; takes milliseconds for a grammar that it has not met lately."""

    def __init__(self, marks: Collection[str]) -> None:
        """marks: texts that are single tokens."""
        self._any_mark = any_text(marks)
        self._marks = [mark for mark in (OPEN, CLOSE) if mark in marks]
        self._problem: Callable[[Grammar], str | None] = lru_cache(_MAX_REMEMBERED)(problem)

    def build(self, request: ChatRequest | CompletionRequest) -> Form:
        """Raises InvalidRequest, naming the field whose grammar is no good."""
        wanted = request.constraint
        if wanted is not None:
            self._refuse_marks(wanted)
            self._check(wanted)
        free = Form() if wanted is None else Form(wanted.grammar, wanted.param)
        if not isinstance(request, ChatRequest) or request.tool_choice.mode == "none":
            return free
        tools = callable_tools(request.tools, request.tool_choice)
        if not tools:
            return free
        for tool in tools:
            self._check(tool.arguments)
        calls = self._calls(request, tools, wanted)
        return Form(calls.grammar, calls.param, tuple(tool.name for tool in tools))

    def _calls(self, request: ChatRequest, tools: list[Tool], wanted: Constraint | None) -> Constraint:
        must_call = request.tool_choice.mode == "required"
        if wanted is not None and wanted.grammar.kind == "lark" and not must_call:
            raise InvalidRequest(f"{wanted.param} does not go together with tools", param=wanted.param)
        text = tools_grammar(
            {tool.name: tool.arguments.grammar.text for tool in tools},
            must_call=must_call,
            parallel=request.parallel_tool_calls,
            marks=self._marks,
            answer=None if wanted is None else wanted.grammar,
        )
        if len(text) > MAX_GRAMMAR_CHARS:
            raise InvalidRequest("tools have too long parameters in all", param="tools")
        calls = Constraint(Grammar(kind="lark", text=text), "tools")
        self._check(calls)
        return calls

    def _refuse_marks(self, wanted: Constraint) -> None:
        """NOTE: the library spells what has to come as the tokenizer does, so as that one token (llguidance 1.9.1).

        Then it either ends the answer or, since it is no text, does not follow the grammar.
        """
        for choice in wanted.choices:
            if found := self._any_mark.search(choice):
                param = wanted.param
                raise InvalidRequest(
                    f"{param} has {found[0]!r}, which is a token of its own, not text", param=param
                )

    def _check(self, constraint: Constraint) -> None:
        reason = self._problem(constraint.grammar)
        if reason is not None:
            param = constraint.param
            raise InvalidRequest(f"{param} cannot be enforced: {reason}", param=param)

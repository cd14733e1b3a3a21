"""The grammar of an answer that may, or must, call tools.

The form that Qwen2.5 was trained on, which a call that must be made always has:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Rome"}}
    </tool_call>

Its coder models write the same object as a block of JSON (```json), or as the whole answer. Where a tool is free
to be called, an object that begins like a call of it is one, in any of these forms, and is completed as one. All
other text stays free. After calls there is nothing but further calls.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence

from shared.wire import Grammar

OPEN, CLOSE = "<tool_call>", "</tool_call>"
FENCE_OPEN, FENCE_CLOSE = "```json", "```"
MAX_CALLS = 32  # of one answer
# Not \s, which is Unicode's: many times the states of the lexer, beyond its limit.
_SPACE = r"[ \t\r\n]{0,12}"


def tools_grammar(
    arguments: Mapping[str, str],
    *,
    must_call: bool,
    parallel: bool,
    marks: Sequence[str],
    answer: Grammar | None = None,
) -> str:
    """Lark text. arguments: tool name -> JSON schema of an object, as text.

    marks: those of OPEN and CLOSE that are single tokens, which are written otherwise than text.
    answer: what text without calls must look like; a schema or a regular expression.
    """
    rules = _marked(list(arguments), parallel=parallel, marks=marks)
    rules += [f"args_{i}: %json {schema}" for i, schema in enumerate(arguments.values())]
    if must_call:
        start = ["start: calls"]
    elif answer is not None:
        body = f"%json {answer.text}" if answer.kind == "json_schema" else f"/{_slashed(answer.text)}/"
        start = ["start: answer | calls", f"answer: {body}"]
    else:
        start = ["start: TEXT | lead body more | blocks | bare", _free_text(list(arguments))]
        # A lazy lexeme ends where it first can; else the text would run on, into the call.
        start.append(f"lead: TEXT {OPEN}" if OPEN in marks else f"lead[lazy]: /(?s:.*){OPEN}/")
        rules += _unmarked(list(arguments), parallel=parallel)
    return "\n".join(["%llguidance {}", *start, *rules, ""])


def _marked(names: Sequence[str], *, parallel: bool, marks: Sequence[str]) -> list[str]:
    """Calls between marks, letter by letter as in training."""
    open_, close = (mark if mark in marks else json.dumps(mark) for mark in (OPEN, CLOSE))
    rules = [
        "calls: open body more",
        f"open: {open_}",
        # The line's end comes first: models write one after their last call too, and only then decide.
        f'more: ("\\n" open body){{0,{MAX_CALLS - 1}}} "\\n"?' if parallel else 'more: "\\n"?',
        f"body: {_any('body', names)}",
    ]
    for i, name in enumerate(names):
        head = json.dumps(f'\n{{"name": {json.dumps(name)}, "arguments": ')
        rules.append(f'body_{i}: {head} args_{i} "}}\\n" {close}')
    return rules


def _unmarked(names: Sequence[str], *, parallel: bool) -> list[str]:
    """Calls in blocks of JSON after any text, and one call as the whole answer."""
    more = f" ({_any('next', names)}){{0,{MAX_CALLS - 1}}}" if parallel else ""
    rules = [
        f"blocks: ({_any('first', names)}){more}",
        f"bare: {_any('bare', names)}",
    ]
    for i, name in enumerate(names):
        rules += [
            f"first_{i}: text_{i} rest_{i} /{_SPACE}{FENCE_CLOSE}/",
            f"text_{i}[lazy]: /(?s:.*){FENCE_OPEN}{_head(name)}/",
            f"next_{i}: /{_SPACE}{FENCE_OPEN}{_head(name)}/ rest_{i} /{_SPACE}{FENCE_CLOSE}/",
            f"bare_{i}: object_{i} rest_{i}",
            f"object_{i}[lazy]: /{_head(name)}/",
            f'rest_{i}: /{_SPACE},{_SPACE}"arguments"{_SPACE}:{_SPACE}/ args_{i} /{_SPACE}\\}}/',
        ]
    return rules


def _free_text(names: Sequence[str]) -> str:
    """Anything in which no call begins, so that nothing can be read both ways."""
    name = f"({'|'.join(names)})"
    begun = f"(?s:.*)({OPEN}|{FENCE_OPEN}{_head(name)})(?s:.*)"
    return f"TEXT: /(?s:.*)/ & ~/{begun}/ & ~/{_head(name)}(?s:.*)/"


def _head(name: str) -> str:
    """The beginning of a call, to the end of its name, as a regular expression."""
    return rf'{_SPACE}\{{{_SPACE}"name"{_SPACE}:{_SPACE}"{name}"'


def _any(rule: str, names: Sequence[str]) -> str:
    return " | ".join(f"{rule}_{i}" for i in range(len(names)))


def _slashed(pattern: str) -> str:
    """A regular expression between slashes; those that are escaped already stay as they are."""
    return re.sub(r"\\.|/", lambda found: r"\/" if found[0] == "/" else found[0], pattern, flags=re.DOTALL)

"""The grammar of an answer that may, or must, call tools, in the form that Qwen2.5 was trained on:

    <tool_call>
    {"name": "get_weather", "arguments": {"city": "Rome"}}
    </tool_call>

Free text before calls stays free, but for the mark itself: where it comes, a whole call follows. After calls
there is nothing but further calls.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence

from shared.wire import Grammar

OPEN, CLOSE = "<tool_call>", "</tool_call>"
_SPACE = "\n"


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
    open_, close = (mark if mark in marks else json.dumps(mark) for mark in (OPEN, CLOSE))
    rules = [
        f"calls: call ({json.dumps(_SPACE)} call)*" if parallel else "calls: call",
        f"call: {' | '.join(f'call_{i}' for i in range(len(arguments)))}",
    ]
    for i, (name, schema) in enumerate(arguments.items()):
        head = json.dumps(f'\n{{"name": {json.dumps(name)}, "arguments": ')
        rules += [f'call_{i}: {open_} {head} args_{i} "}}\\n" {close}', f"args_{i}: %json {schema}"]
    if must_call:
        start = ["start: calls"]
    elif answer is not None:
        body = f"%json {answer.text}" if answer.kind == "json_schema" else f"/{_slashed(answer.text)}/"
        start = ["start: answer | calls", f"answer: {body}"]
    else:
        # Text may hold anything but the whole mark, so it is never read both ways.
        start = ["start: TEXT | TEXT calls", f"TEXT: /(?s:.*)/ & ~/(?s:.*){OPEN}(?s:.*)/"]
    return "\n".join(["%llguidance {}", *start, *rules, ""])


def _slashed(pattern: str) -> str:
    """A regular expression between slashes."""
    return pattern.replace("/", r"\/")

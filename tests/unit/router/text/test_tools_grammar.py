"""What an answer with tools may be: free text, and calls that are whole and right in every form."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from router.text.tokenizer import TextTokenizer
from router.text.tools_grammar import tools_grammar
from shared.engine.grammar import GrammarCompiler
from shared.wire import Grammar

CITY = json.dumps(
    {
        "type": "object",
        "properties": {"city": {"type": "string"}},
        "required": ["city"],
        "additionalProperties": False,
    }
)
TOOLS = {"f": CITY, "get-weather": '{"type": "object"}'}
GOOD = '{"name": "f", "arguments": {"city": "Rome"}}'
MARKED = f"<tool_call>\n{GOOD}\n</tool_call>"
BLOCK = '```json\n{\n  "name": "get-weather",\n  "arguments": {"x": [1]}\n}\n```'


@pytest.fixture(scope="module")
def compiler(tiny_folder: Path, tokenizer: TextTokenizer) -> GrammarCompiler:
    """Of the tiny tokenizer."""
    ends = [tokenizer.control_ids["<|im_end|>"]]
    return GrammarCompiler.load(tiny_folder, vocab_size=tokenizer.vocab_size, eos_token_ids=ends)


def may_be(compiler: GrammarCompiler, tokenizer: TextTokenizer, text: str, **options: Any) -> bool:
    """May the whole answer be `text`?"""
    wanted: dict[str, Any] = {"must_call": False, "parallel": True, "marks": tuple(tokenizer.control_ids)}
    lark = tools_grammar(TOOLS, **(wanted | options))
    state = compiler.start(Grammar(kind="lark", text=lark))
    end = compiler.eos_token_ids[0]
    tokens = tokenizer.encode(text, allow_special=bool((wanted | options)["marks"]))
    return state.advance(tokens) and bool(state.allowed()[end])


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Hello!",
        MARKED,
        f"{MARKED}\n{MARKED}",
        f"{MARKED}\n",
        f"Let me see.\n{MARKED}",
        BLOCK,
        f"Sure:\n{BLOCK}\n{BLOCK}",
        GOOD,
        '```json\n{"name": "Bob", "arguments": 5}\n```\nand more',
        "```python\nprint(1)\n```",
        '{"name": "Bob"}',
        "é 你好 <tool> `x`",
    ],
)
def test_free_text_and_whole_calls_are_allowed(
    compiler: GrammarCompiler, tokenizer: TextTokenizer, text: str
) -> None:
    """In any of the forms."""
    assert may_be(compiler, tokenizer, text)


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>',
        '<tool_call>\n{"name": "f", "arguments": {"town": "Rome"}}\n</tool_call>',
        '<tool_call>\n{"name": "f"}\n</tool_call>',
        "<tool_call>",
        f"{MARKED} and more",
        '```json\n{"name": "f", "arguments": {"town": "Rome"}}\n```',
        '```json\n{"name": "f", "args": {}}\n```',
        f"{BLOCK} and more",
        f"{GOOD} and more",
        '{"name": "f", "arguments": {}}',
    ],
)
def test_nothing_that_begins_like_a_call_is_anything_else(
    compiler: GrammarCompiler, tokenizer: TextTokenizer, text: str
) -> None:
    """Wrong names, wrong arguments, halves, and text behind."""
    assert not may_be(compiler, tokenizer, text)


def test_a_call_that_must_be_made_is_made_at_once(
    compiler: GrammarCompiler, tokenizer: TextTokenizer
) -> None:
    """No text before it, and one is enough."""
    assert may_be(compiler, tokenizer, MARKED, must_call=True)
    assert may_be(compiler, tokenizer, f"{MARKED}\n{MARKED}", must_call=True)
    assert not may_be(compiler, tokenizer, "", must_call=True)
    assert not may_be(compiler, tokenizer, f"Hm. {MARKED}", must_call=True)
    assert not may_be(compiler, tokenizer, BLOCK, must_call=True)


@pytest.mark.parametrize("call", [MARKED, BLOCK])
def test_without_parallel_calls_there_is_one(
    compiler: GrammarCompiler, tokenizer: TextTokenizer, call: str
) -> None:
    """In both forms."""
    assert may_be(compiler, tokenizer, f"Hm. {call}", parallel=False)
    assert not may_be(compiler, tokenizer, f"Hm. {call}\n{call}", parallel=False)


def test_a_format_takes_the_place_of_free_text(compiler: GrammarCompiler, tokenizer: TextTokenizer) -> None:
    """Calls are possible all the same."""
    answer = Grammar(kind="regex", text="yes|a/b")

    assert may_be(compiler, tokenizer, "yes", answer=answer)
    assert may_be(compiler, tokenizer, "a/b", answer=answer)
    assert may_be(compiler, tokenizer, MARKED, answer=answer)
    assert not may_be(compiler, tokenizer, "no", answer=answer)


@pytest.mark.parametrize(
    ("pattern", "text"),
    [("a/b", "a/b"), (r"a\/b", "a/b"), (r"a\\/b", r"a\/b"), (r"a[/]\d", "a/1"), (r"a[\/]\d", "a/1")],
)
def test_slashes_of_a_format_may_be_escaped(
    compiler: GrammarCompiler, tokenizer: TextTokenizer, pattern: str, text: str
) -> None:
    r"""`\/` once became `\\/`, where the expression ended: with tools it was refused."""
    answer = Grammar(kind="regex", text=pattern)

    assert may_be(compiler, tokenizer, text, answer=answer)
    assert not may_be(compiler, tokenizer, "no", answer=answer)


def test_marks_that_are_no_tokens_are_spelled(compiler: GrammarCompiler, tokenizer: TextTokenizer) -> None:
    """A tokenizer without them can call as well."""
    for text in (MARKED, f"{MARKED}\n{MARKED}", f"Hm. {MARKED}", "Hm."):
        assert may_be(compiler, tokenizer, text, marks=())
    assert not may_be(compiler, tokenizer, "<tool_call> no call", marks=())

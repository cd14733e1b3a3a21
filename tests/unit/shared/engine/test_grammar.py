"""Constrained answers: whatever the logits say, the text follows the grammar, and ends when it is complete."""

from __future__ import annotations

import json
import re
from pathlib import Path
from random import Random
from typing import Any

import jsonschema
import numpy as np
import pytest
import torch
from llguidance import LLParserLimits
from torch import Tensor

from router.text.tokenizer import TextTokenizer
from shared.engine.grammar import (
    MAX_CACHED,
    MAX_CACHED_CHARS,
    CompiledGrammar,
    GrammarCompiler,
    GrammarState,
)
from shared.engine.step import Step
from shared.errors import EngineFault, InvalidRequest
from shared.grammar import problem
from shared.wire import Grammar
from tests.support.tiny_tokenizer import write_tiny_tokenizer
from tests.unit.shared.engine.conftest import MakeEngine
from tests.unit.shared.engine.helpers import Client, make_work, tokens_of

SPARE_ROWS = 19
POINT = {
    "type": "object",
    "properties": {"x": {"enum": [1, 22, 333]}, "tag": {"enum": ["é", "a b", ""]}, "on": {"type": "boolean"}},
    "required": ["x", "tag", "on"],
    "additionalProperties": False,
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny tokenizer's files."""
    folder = tmp_path_factory.mktemp("tokenizer")
    write_tiny_tokenizer(folder)
    return folder


@pytest.fixture(scope="module")
def tokenizer(folder: Path) -> TextTokenizer:
    """To turn tokens into text and back."""
    return TextTokenizer.load(folder)


@pytest.fixture(scope="module")
def ends(tokenizer: TextTokenizer) -> tuple[int, int]:
    """Both end tokens."""
    return tokenizer.control_ids["<|im_end|>"], tokenizer.control_ids["<|endoftext|>"]


@pytest.fixture
def compiler(folder: Path, tokenizer: TextTokenizer, ends: tuple[int, int]) -> GrammarCompiler:
    """With rows that no token has."""
    size = tokenizer.vocab_size + SPARE_ROWS
    return GrammarCompiler.load(folder, vocab_size=size, eos_token_ids=ends)


class NoiseRunner:
    """A model of random logits, another row for each position; it would like `favourite` best."""

    def __init__(self, vocab_size: int, favourite: int | None = None) -> None:
        self._vocab_size = vocab_size
        self._favourite = favourite

    def run(self, step: Step) -> Tensor:
        positions = [seq.num_computed + 1 for seq in step.decodes]
        positions += [chunk.end for chunk in step.chunks if chunk.is_last]
        return torch.stack([self._row(position) for position in positions])

    def _row(self, position: int) -> Tensor:
        row = torch.randn(self._vocab_size, generator=torch.Generator().manual_seed(position)) * 3
        if self._favourite is not None:
            row[self._favourite] = 100
        return row


def schema(content: dict[str, Any]) -> Grammar:
    """A JSON schema as a grammar."""
    return Grammar(kind="json_schema", text=json.dumps(content))


def serve(
    make_engine: MakeEngine,
    compiler: GrammarCompiler,
    grammar: Grammar | None,
    *,
    generated: list[int] | None = None,
    favourite: int | None = None,
    num_choices: int = 1,
    **sampling: Any,
) -> dict[int, list[int]]:
    """Tokens of each choice from an engine over a noise model."""
    size = compiler.vocab_size
    engine = make_engine(
        NoiseRunner(size, favourite), num_blocks=256, eos=compiler.eos_token_ids, vocab_size=size
    )
    prompt = [1, 2, 3]
    work = make_work(
        prompt + (generated or []),
        num_prompt_tokens=len(prompt),
        num_choices=num_choices,
        **({"temperature": 1.0, "max_tokens": 200} | sampling),
    )
    client = Client(work)
    client.group.grammar = compiler.start(grammar, generated or ()) if grammar is not None else None
    engine.submit(client.group)
    events = client.rest()
    engine.release(client.group)
    return tokens_of(events)


@pytest.mark.parametrize("seed", range(8))
def test_noise_under_a_schema_is_an_instance_of_it(
    make_engine: MakeEngine, compiler: GrammarCompiler, tokenizer: TextTokenizer, seed: int
) -> None:
    """Every choice parses, validates, and ends with an end token as soon as it is complete."""
    made = serve(make_engine, compiler, schema(POINT), num_choices=3, seed=seed)

    for tokens in made.values():
        assert tokens[-1] in compiler.eos_token_ids
        jsonschema.validate(json.loads(tokenizer.decode(tokens[:-1])), POINT)


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("pattern", [r"[a-f]{3,8}", r"(yes|no) \d\d", r"é+!"])
def test_noise_under_a_regex_matches_it(
    make_engine: MakeEngine,
    compiler: GrammarCompiler,
    tokenizer: TextTokenizer,
    pattern: str,
    temperature: float,
) -> None:
    """The whole answer, greedy and sampled."""
    tokens = serve(
        make_engine, compiler, Grammar(kind="regex", text=pattern), temperature=temperature, max_tokens=400
    )[0]

    text = tokenizer.decode(tokens)
    assert re.fullmatch(pattern, text) or len(tokens) == 400


@pytest.mark.parametrize(
    "sampling",
    [
        {"ignore_eos": True},
        {"min_tokens": 150},
        {"ignore_eos": True, "min_tokens": 150},
        {"logit_bias": {5: 100.0}},
    ],
)
def test_a_finished_grammar_ends_whatever_else_is_set(
    make_engine: MakeEngine, compiler: GrammarCompiler, tokenizer: TextTokenizer, sampling: dict[str, Any]
) -> None:
    """Neither ignore_eos nor min_tokens nor a bias leads out of the grammar."""
    grammar = Grammar(kind="regex", text="[ab]{4}")

    tokens = serve(make_engine, compiler, grammar, **sampling)[0]

    assert re.fullmatch("[ab]{4}", tokenizer.decode(tokens[:-1]))
    assert tokens[-1] in compiler.eos_token_ids


@pytest.mark.parametrize("sampling", [{"ignore_eos": True}, {"min_tokens": 30}])
def test_an_unwanted_end_is_put_off_while_the_grammar_can_go_on(
    make_engine: MakeEngine, compiler: GrammarCompiler, ends: tuple[int, int], sampling: dict[str, Any]
) -> None:
    """ignore_eos and min_tokens hold as long as there is anything else to say."""
    grammar = Grammar(kind="regex", text="[ab]*")

    tokens = serve(make_engine, compiler, grammar, favourite=ends[0], max_tokens=40, **sampling)[0]

    assert (40 if "ignore_eos" in sampling else 31) == len(tokens)


def test_a_resumed_choice_goes_on_with_the_same_tokens(
    make_engine: MakeEngine, compiler: GrammarCompiler
) -> None:
    """From any point: the state is a function of the tokens so far."""
    whole = serve(make_engine, compiler, schema(POINT), seed=5)[0]

    for cut in range(1, len(whole)):
        resumed = serve(make_engine, compiler, schema(POINT), seed=5, generated=whole[:cut])[0]
        assert whole == whole[:cut] + resumed


def test_rows_without_text_and_special_tokens_are_never_allowed(
    compiler: GrammarCompiler, tokenizer: TextTokenizer, ends: tuple[int, int]
) -> None:
    """Even where any text is allowed; end tokens are, where the grammar may end."""
    allowed = compiler.start(Grammar(kind="regex", text=r"(.|\n)*")).allowed()

    assert compiler.vocab_size == len(allowed)
    assert not allowed[tokenizer.vocab_size :].any()
    assert not allowed[tokenizer.control_ids["<|im_start|>"]]
    assert allowed[list(ends)].all()


@pytest.mark.parametrize(
    ("kind", "text"),
    [
        ("json_schema", "{"),
        ("json_schema", "[]"),
        ("json_schema", '{"type": "wat"}'),
        ("json_schema", '{"type": "integer", "minimum": 3, "maximum": 1}'),
        ("json_schema", '{"$ref": "http://example.com/x.json"}'),
        ("regex", "(a"),
        ("regex", "(?=a)b"),
        ("lark", "start: foo"),
        ("lark", "not a grammar"),
    ],
)
def test_a_bad_grammar_is_refused_in_one_line(compiler: GrammarCompiler, kind: Any, text: str) -> None:
    """By the check without a tokenizer, and again by a worker that is called directly."""
    grammar = Grammar(kind=kind, text=text)

    reason = problem(grammar)

    assert reason
    assert "\n" not in reason
    with pytest.raises(InvalidRequest):
        compiler.start(grammar)


def test_a_grammar_that_would_take_too_much_is_refused(compiler: GrammarCompiler) -> None:
    """The work of compiling is bounded."""
    with pytest.raises(InvalidRequest):
        compiler.start(Grammar(kind="regex", text="(" * 500 + "a" + "){1,9}" * 500))


def test_tokens_that_break_the_grammar_are_a_fault(
    compiler: GrammarCompiler, tokenizer: TextTokenizer
) -> None:
    """A first token of another grammar never leads to an answer."""
    state = compiler.start(Grammar(kind="regex", text="[ab]+")).after(tokenizer.encode("z")[0])

    with pytest.raises(EngineFault):
        state.allowed()
    with pytest.raises(InvalidRequest):
        compiler.start(Grammar(kind="regex", text="[ab]+"), tokenizer.encode("z"))


def test_states_of_one_grammar_are_independent(compiler: GrammarCompiler, tokenizer: TextTokenizer) -> None:
    """Also when the compiled grammar comes from the cache, and after it was evicted."""
    grammar = Grammar(kind="regex", text="ab|cd")
    fresh = compiler.start(grammar).allowed().copy()
    compiler.start(grammar).advance(tokenizer.encode("a"))
    for number in range(MAX_CACHED + 1):
        assert np.array_equal(fresh, compiler.start(grammar).allowed()) or number == 0
        compiler.start(Grammar(kind="regex", text=f"x{number}"))
    assert np.array_equal(fresh, compiler.start(grammar).allowed())


def test_what_is_kept_is_bounded_by_its_text(compiler: GrammarCompiler) -> None:
    """Thirty-two long grammars kept 3.2 GB. The last is kept whatever its length, and small ones all."""
    small = [Grammar(kind="regex", text=f"a{number}") for number in range(MAX_CACHED)]
    for grammar in small:
        compiler.start(grammar)
    assert all(compiler.cached(grammar) for grammar in small)

    size = MAX_CACHED_CHARS // 5
    large = [schema({"enum": [f"{number}"], "description": "x" * size}) for number in range(6)]
    for grammar in large:
        compiler.start(grammar)
    kept = [number for number, grammar in enumerate(large) if compiler.cached(grammar)]
    assert [2, 3, 4, 5] == kept

    huge = schema({"enum": ["a"], "description": "x" * (MAX_CACHED_CHARS + 1)})
    compiler.start(huge)
    assert compiler.cached(huge)
    assert not any(compiler.cached(grammar) for grammar in large)


def test_a_grammar_beyond_our_own_limits_is_refused_by_the_worker_too(compiler: GrammarCompiler) -> None:
    """A worker that is called directly compiled it for hours."""
    with pytest.raises(InvalidRequest, match="multipleOf"):
        compiler.start(schema({"type": "integer", "multipleOf": 3_000_017}))
    assert not compiler.cached(schema({"type": "integer", "multipleOf": 3_000_017}))


@pytest.fixture
def narrow(compiler: GrammarCompiler) -> CompiledGrammar:
    """A grammar with many states, and a limit that a few answers use up."""
    limits = LLParserLimits(max_lexer_states=1000, verbose_errors=False)
    return CompiledGrammar(compiler.tokenizer, Grammar(kind="regex", text="[ab]*a[ab]{40}"), limits)


def answers_of_many_states(tokenizer: TextTokenizer, number: int) -> list[list[int]]:
    """Tokens of random answers, each of which meets some hundred states of `narrow` that no other meets."""
    rng = Random(1)
    return [tokenizer.encode("".join(rng.choices("ab", k=150))) for _ in range(number)]


def test_what_earlier_answers_used_up_is_not_missed_by_later_ones(
    narrow: CompiledGrammar, tokenizer: TextTokenizer
) -> None:
    """The states that a grammar's answers have met are kept for the next ones, up to a limit that all share."""
    for answer in answers_of_many_states(tokenizer, 8):
        state = GrammarState(narrow)
        for token in answer:
            assert state.allowed()[token]
            assert state.advance([token])
    assert narrow.edition > 1


def test_answers_that_run_out_together_share_what_is_new(
    narrow: CompiledGrammar, tokenizer: TextTokenizer
) -> None:
    """One compilation for all that are in the batch, not one for each."""
    answers = answers_of_many_states(tokenizer, 4)
    states = [GrammarState(narrow) for _ in answers]
    for tokens in zip(*answers, strict=False):
        for state, token in zip(states, tokens, strict=True):
            assert state.allowed()[token]
            assert state.advance([token])
    assert 1 < narrow.edition <= 4


def test_a_neighbour_in_the_batch_is_not_touched(make_engine: MakeEngine, compiler: GrammarCompiler) -> None:
    """A free request gets the same tokens beside a constrained one as alone."""
    size = compiler.vocab_size
    alone = serve(make_engine, compiler, None, seed=9, max_tokens=30)[0]
    engine = make_engine(NoiseRunner(size), num_blocks=256, eos=compiler.eos_token_ids, vocab_size=size)
    bound = Client(make_work([1, 2, 3], temperature=1.0, max_tokens=60, seed=1))
    bound.group.grammar = compiler.start(Grammar(kind="regex", text="a{60}"))
    free = Client(make_work([1, 2, 3], temperature=1.0, max_tokens=30, seed=9))

    for client in (bound, free):
        engine.submit(client.group)
    together = tokens_of(free.rest())[0]
    bound.rest()
    for client in (bound, free):
        engine.release(client.group)

    assert alone == together

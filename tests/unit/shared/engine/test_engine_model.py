"""The whole engine with the tiny model: a token is a function of its request alone."""

from __future__ import annotations

import random
from collections.abc import Iterator
from typing import Any

import pytest
import torch

from shared.engine.blocks import BlockPool
from shared.engine.engine import Engine
from shared.engine.kv_cache import CacheShape, KVCache
from shared.engine.runner import Runner
from shared.engine.sequence import Admitted, Mode
from shared.wire import First, Work
from tests.unit.shared.engine.conftest import TinyModel
from tests.unit.shared.engine.helpers import Client, assert_empty, make_limits, make_work, tokens_of


@pytest.fixture
def engine(tiny: TinyModel) -> Iterator[Engine]:
    """Chunks of 8 on blocks of 4, found empty at the end."""
    config = tiny.model.config
    pool = BlockPool(160, 4)
    head_dim = config.hidden_size // config.num_attention_heads
    shape = CacheShape(config.num_hidden_layers, 160, 4, config.num_key_value_heads, head_dim, torch.float32)
    limits = make_limits(chunk_size=8, vocab_size=config.vocab_size)
    made = Engine(pool, limits, Runner(tiny.model, KVCache(shape, torch.device("cpu"))), ())
    made.start()
    yield made
    made.close()
    assert_empty(pool)


def _tokens(length: int, seed: int) -> list[int]:
    rng = random.Random(seed)
    return [rng.randrange(600) for _ in range(length)]


def _serve(engine: Engine, *works: Work) -> list[dict[int, list[int]]]:
    """Run all at once."""
    clients = [Client(work) for work in works]
    for client in clients:
        engine.submit(client.group)
    made = [tokens_of(client.rest()) for client in clients]
    for client in clients:
        engine.release(client.group)
    return made


def test_sampled_choices_are_repeatable_and_differ(engine: Engine) -> None:
    """Three calls with one seed are equal, n choices differ, and choice 0 is what n = 1 gives."""
    options: dict[str, Any] = {"temperature": 1.2, "seed": 7, "max_tokens": 8}
    first, second, third = (
        _serve(engine, make_work(_tokens(13, 1), num_choices=4, **options))[0] for _ in range(3)
    )
    assert first == second == third
    assert 4 == len({tuple(choice) for choice in first.values()})
    assert [{0: first[0]}] == _serve(engine, make_work(_tokens(13, 1), **options))


def test_a_batch_gives_what_each_request_gets_alone(engine: Engine) -> None:
    """Other prompts, penalties and lengths beside a request change nothing of it."""
    works = [
        make_work(
            _tokens(5 + 3 * i, i),
            num_choices=1 + i % 3,
            temperature=0.9,
            seed=i,
            max_tokens=6 + i,
            repetition_penalty=1.5 if i % 2 else 1.0,
        )
        for i in range(5)
    ]
    assert [_serve(engine, work)[0] for work in works] == _serve(engine, *works)


def test_retries_after_a_cancel_are_clean(engine: Engine) -> None:
    """Five requests cancelled at their second token, sent again: greedy ids as in a clean run.

    The tiny model's margins are far above what another batch shape can change, so equality is the rule.
    """
    works = [make_work(_tokens(9 + i, i), max_tokens=12) for i in range(5)]
    clean = _serve(engine, *works)
    for _ in range(3):
        cancelled = [Client(work) for work in works]
        for client in cancelled:
            engine.submit(client.group)
        for client in cancelled:
            client.take(Admitted)
            client.take(First)
            engine.cancel(client.group)
            engine.release(client.group)
        assert clean == _serve(engine, *works)
    assert clean == [_serve(engine, work)[0] for work in works]


@pytest.mark.parametrize("num_kept", [1, 3, 8])
def test_a_resumed_choice_goes_on_with_the_same_tokens(engine: Engine, num_kept: int) -> None:
    """Another worker that gets prompt and output so far draws what the lost one would have drawn."""
    prompt = _tokens(11, 3)
    options: dict[str, Any] = {"temperature": 1.1, "seed": 5, "max_tokens": 9, "presence_penalty": 1.0}
    whole = _serve(engine, make_work(prompt, num_choices=2, **options))[0]
    for choice, tokens in whole.items():
        kept = prompt + tokens[:num_kept]
        resumed = make_work(kept, num_prompt_tokens=11, **options).model_copy(update={"first_choice": choice})
        assert [{choice: tokens[num_kept:]}] == _serve(engine, resumed)


@pytest.mark.parametrize("length", [1, 4, 5, 15, 16, 17, 33])
def test_a_split_request_gives_the_tokens_of_a_whole_one(engine: Engine, length: int) -> None:
    """Prefill draws the first tokens, decode goes on from them; each position is drawn once.

    Both sides share one pool here, so the receiver finds full blocks and is given the rest by a copy.
    """
    options: dict[str, Any] = {"temperature": 1.0, "seed": 11, "max_tokens": 6}
    work = make_work(_tokens(length, length), num_choices=3, **options)
    whole = _serve(engine, work)[0]
    prefill, decode = Client(work, Mode.PREFILL), Client(work, Mode.RECEIVE)
    engine.submit(prefill.group)
    source = prefill.take(Admitted).blocks
    first = tokens_of([prefill.take(First)])
    engine.submit(decode.group)
    target = decode.take(Admitted).blocks
    cache = engine._runner._cache  # type: ignore[attr-defined]
    cache.copy_blocks([(a, b) for a, b in zip(source, target, strict=True) if a != b])
    engine.received(decode.group, {choice: tokens[0] for choice, tokens in first.items()})
    rest = tokens_of(decode.rest())
    assert whole == {choice: first[choice] + rest[choice] for choice in first}
    for client in (prefill, decode):
        engine.release(client.group)

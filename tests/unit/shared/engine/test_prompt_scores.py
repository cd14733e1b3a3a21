"""Logprobs of a prompt's own tokens: what transformers' forward pass says, at any chunking."""

from __future__ import annotations

import random
from collections.abc import Iterator

import pytest
import torch

from shared.engine.blocks import BlockPool
from shared.engine.engine import Engine
from shared.engine.kv_cache import CacheShape, KVCache
from shared.engine.prompt_scores import ROWS_AT_A_TIME, score_prompt
from shared.engine.runner import Runner
from shared.engine.sequence import Admitted, Mode, PromptScores
from shared.errors import EngineFault
from shared.wire import Finish, First, Logprobs
from tests.unit.shared.engine.conftest import TinyModel
from tests.unit.shared.engine.helpers import Client, assert_empty, make_limits, make_work

LENGTHS = (1, 2, 16, 17, 41, 300)


@pytest.fixture(params=[8, 0], ids=["chunks of 8", "whole prompts"])
def engine(tiny: TinyModel, request: pytest.FixtureRequest) -> Iterator[Engine]:
    """The tiny model on blocks of 4, found empty at the end."""
    config = tiny.model.config
    pool = BlockPool(160, 4)
    head_dim = config.hidden_size // config.num_attention_heads
    shape = CacheShape(config.num_hidden_layers, 160, 4, config.num_key_value_heads, head_dim, torch.float32)
    limits = make_limits(chunk_size=request.param, vocab_size=config.vocab_size)
    made = Engine(pool, limits, Runner(tiny.model, KVCache(shape, torch.device("cpu"))), ())
    made.start()
    yield made
    made.close()
    assert_empty(pool)


def _scores(client: Client) -> tuple[list[Logprobs], First]:
    """Everything up to the first tokens."""
    client.take(Admitted)
    scores: list[Logprobs] = []
    event = client.events.get(timeout=20)
    while isinstance(event, PromptScores):
        scores += event.logprobs
        event = client.events.get(timeout=20)
    assert isinstance(event, First)
    return scores, event


@pytest.mark.parametrize("mode", [Mode.LOCAL, Mode.PREFILL], ids=lambda mode: mode.value)
def test_scores_are_the_log_softmax_of_plain_transformers(
    engine: Engine, tiny: TinyModel, mode: Mode
) -> None:
    """Twice for every length, so that a cached prompt is scored in full too."""
    rng = random.Random(5)
    for length in LENGTHS:
        prompt = [rng.randrange(600) for _ in range(length)]
        with torch.inference_mode():
            logits = tiny.oracle(torch.tensor([prompt])).logits[0].float()
        expected = torch.log_softmax(logits, dim=-1)
        for _ in range(2):
            client = Client(make_work(prompt, num_prompt_logprobs=3, max_tokens=1), mode)
            engine.submit(client.group)
            scores, first = _scores(client)
            engine.release(client.group)
            assert (0, length) == (first.cached_tokens, first.computed_tokens)
            assert length - 1 == len(scores)
            for position, score in enumerate(scores):
                row = expected[position]
                assert score.token == pytest.approx(float(row[prompt[position + 1]]), abs=1e-3)
                assert [value for _, value in score.top] == pytest.approx(
                    row.topk(3).values.tolist(), abs=1e-3
                )


def test_no_tokens_wanted_is_a_prompt_that_is_only_read(engine: Engine) -> None:
    """max_tokens 0 fills the context to its end, samples nothing and ends by itself."""
    client = Client(make_work([7] * 512, num_prompt_logprobs=0, max_tokens=0))
    engine.submit(client.group)
    scores, first = _scores(client)

    assert 511 == len(scores)
    assert [] == first.tokens
    assert 0 == client.take(Finish).output_tokens
    engine.release(client.group)


def test_a_scored_neighbour_changes_nothing(engine: Engine) -> None:
    """Rows of a scored chunk are not mistaken for those of another request in the same step."""
    prompts = [[(7 * i + j) % 500 for j in range(20 + i)] for i in range(4)]

    def serve(*scored: bool) -> list[int]:
        clients = [
            Client(make_work(prompt, num_prompt_logprobs=1 if wanted else None, max_tokens=1))
            for prompt, wanted in zip(prompts, scored, strict=True)
        ]
        for client in clients:
            engine.submit(client.group)
        firsts = [_scores(client)[1] for client in clients]
        for client in clients:
            engine.release(client.group)
        return [first.tokens[0].token_id for first in firsts]

    assert serve(False, False, False, False) == serve(True, False, True, False)


def test_scores_have_a_floor_and_nan_is_a_fault() -> None:
    """JSON has neither minus infinity nor NaN."""
    num_rows = ROWS_AT_A_TIME + 1
    logits = torch.zeros(num_rows, 4)
    logits[:, 2] = -torch.inf

    scores = score_prompt(logits, [2] * num_rows, 4)

    assert [-9999.0] * num_rows == [score.token for score in scores]
    assert all(len(score.top) == 4 for score in scores)
    logits[3, 0] = torch.nan
    with pytest.raises(EngineFault):
        score_prompt(logits, [2] * num_rows, 0)

"""The tiny model, loaded once, and engines that are closed and found empty at the end."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from shared.engine.blocks import BlockPool
from shared.engine.engine import Engine
from shared.engine.runner import StepRunner
from tests.support.tiny_model import build_tiny_model
from tests.unit.shared.engine.helpers import GatedRunner, assert_empty, make_limits

MakeEngine = Callable[..., Engine]


@dataclass(frozen=True)
class TinyModel:
    """Two copies of one random Qwen2.5: ours to plug into, and transformers' own as the oracle."""

    model: PreTrainedModel
    oracle: PreTrainedModel


@pytest.fixture(scope="session")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> TinyModel:
    """Built and loaded once for all tests."""
    torch.set_num_threads(1)
    folder = build_tiny_model(tmp_path_factory.mktemp("tiny"))
    ours, oracle = (
        AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32, attn_implementation=attention)
        for attention in ("sdpa", "eager")
    )
    return TinyModel(ours, oracle)


@pytest.fixture
def make_engine() -> Iterator[MakeEngine]:
    """Started engines. At the end every request must have been released, and nothing may be left."""
    made: list[tuple[Engine, BlockPool, StepRunner]] = []

    def make(
        runner: StepRunner,
        *,
        num_blocks: int = 32,
        eos: tuple[int, ...] = (),
        clock: Callable[[], float] = time.monotonic,
        **limits: int,
    ) -> Engine:
        pool = BlockPool(num_blocks, block_size=4)
        engine = Engine(pool, make_limits(**limits), runner, eos, clock)
        engine.start()
        made.append((engine, pool, runner))
        return engine

    yield make
    for engine, pool, runner in made:
        if isinstance(runner, GatedRunner):
            runner.open()
        engine.close()
        assert 0 == engine.num_groups
        assert_empty(pool)

"""Long answers let everything else have its turn while they are put into bytes."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncGenerator, AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest

from router.answering import BYTES_PER_LOGPROB, TURN_BYTES, Answer, Answering
from router.generation import Batch, Generation
from router.metrics import RouterMetrics
from router.offload import Offload
from router.openai.responses import Usage
from router.report import Report
from router.settings import RouterSettings
from router.text.choice import Piece

NUM_BATCHES = 50


class Scored:
    """Stands for a generation whose every batch is there at once. num_logprobs: what it says it has."""

    num_choices = 1

    def __init__(self, num_logprobs: int) -> None:
        self.num_logprobs = num_logprobs

    async def batches(self) -> AsyncGenerator[Batch, None]:
        for _ in range(NUM_BATCHES):
            yield [(0, Piece("x"))]

    def shown(self) -> list[int]:
        return [0]

    def usage(self) -> Usage:
        return Usage(1, 1)

    def report(self) -> Report:
        return Report(prompt_tokens=1)

    async def aclose(self) -> None:
        pass


class Told:
    """Stands for an answer: events of TURN_BYTES, and where the rest was made."""

    def start(self, *_: Any) -> bytes:
        return b""

    def piece(self, *_: Any) -> bytes:
        return b"x" * TURN_BYTES

    def closing(self, *_: Any) -> bytes:
        return threading.current_thread().name.encode()

    def whole(self, *_: Any) -> bytes:
        return threading.current_thread().name.encode()


@pytest.fixture
async def offload() -> AsyncIterator[Offload]:
    """Long is what has more than a hundred logprobs."""
    made = Offload(RouterSettings(offload_chars=100 * BYTES_PER_LOGPROB))
    yield made
    made.close()


def answering(offload: Offload, *, num_logprobs: int) -> Answering:
    """Of a request with so many."""
    return Answering(
        cast(Generation, Scored(num_logprobs)),
        cast(Answer, Told()),
        endpoint="completions",
        stream=True,
        continuous_usage=False,
        started=0.0,
        metrics=cast(RouterMetrics, SimpleNamespace(ended=lambda *_, **__: None)),
        offload=offload,
        release=lambda: None,
    )


@pytest.mark.parametrize(("num_logprobs", "is_here"), [(100, True), (101, False)])
async def test_many_logprobs_are_encoded_in_a_thread(
    offload: Offload, num_logprobs: int, *, is_here: bool
) -> None:
    """Whole, and in a stream's last events: /health once waited three seconds for a whole answer."""
    whole = await answering(offload, num_logprobs=num_logprobs).whole()
    streamed = answering(offload, num_logprobs=num_logprobs)
    await streamed.start()
    *_, last = [chunk async for chunk in streamed.chunks()]
    here = threading.current_thread().name.encode()
    assert [is_here] * 2 == [bytes(whole.body) == here, last == here]


async def test_a_long_stream_gives_others_their_turn(offload: Offload) -> None:
    """Even where all is there and the client takes it at once: nothing waited, so nothing else ever ran."""
    turns = 0

    async def others() -> None:
        nonlocal turns
        while True:
            turns += 1
            await asyncio.sleep(0)

    running = asyncio.create_task(others())
    streamed = answering(offload, num_logprobs=0)
    await streamed.start()
    async for _ in streamed.chunks():
        pass
    running.cancel()
    assert turns >= NUM_BATCHES - 1

"""Requests for engine tests, runners without a model, and a request's events as a queue."""

from __future__ import annotations

import queue
import time
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

from shared.engine.blocks import BlockPool
from shared.engine.engine import Engine
from shared.engine.sequence import Event, Failed, Group, Mode, PromptProgress
from shared.engine.step import Limits, Step
from shared.errors import ServingError
from shared.wire import Finish, First, Sampling, TokenOut, Work

VOCAB = 64
WAIT_S = 20.0
"""No test waits this long unless it fails."""

E = TypeVar("E")


def make_work(
    token_ids: Sequence[int],
    *,
    num_choices: int = 1,
    num_prompt_tokens: int | None = None,
    **sampling: Any,
) -> Work:
    """Greedy, four tokens, unless `sampling` says otherwise."""
    wanted = {"temperature": 0.0, "max_tokens": 4, **sampling}
    return Work(
        request_id="r",
        token_ids=list(token_ids),
        num_prompt_tokens=len(token_ids) if num_prompt_tokens is None else num_prompt_tokens,
        num_choices=num_choices,
        sampling=Sampling.model_validate(wanted),
        timeout_s=60,
    )


def make_limits(**changes: int) -> Limits:
    """Wide limits, whole prompts, `changes` applied."""
    wide = {"chunk_size": 0, "max_num_seqs": 64, "max_queued": 64, "max_model_len": 512, "vocab_size": VOCAB}
    return Limits(**(wide | changes))


class Client:
    """A group and its events, in order."""

    def __init__(
        self,
        work: Work,
        mode: Mode = Mode.LOCAL,
        *,
        deadline: float | None = None,
        progress: PromptProgress | None = None,
    ) -> None:
        self.events: queue.SimpleQueue[Event] = queue.SimpleQueue()
        deadline = time.monotonic() + 60 if deadline is None else deadline
        self.group = Group(work, mode, deadline, self.events.put, progress)

    def take(self, kind: type[E]) -> E:
        """The next event, which must be a `kind`."""
        event = self.events.get(timeout=WAIT_S)
        assert isinstance(event, kind), event
        return event

    def rest(self) -> list[Event]:
        """Events up to and including the last one of the request."""
        taken = [self.events.get(timeout=WAIT_S)]
        while not isinstance(taken[-1], Finish | Failed):
            taken.append(self.events.get(timeout=WAIT_S))
        return taken

    def error(self) -> ServingError:
        """How the request failed; nothing else may come any more."""
        last = self.rest()[-1]
        assert isinstance(last, Failed), last
        assert self.events.empty()
        return last.error


def tokens_of(events: Sequence[Event]) -> dict[int, list[int]]:
    """Token ids of each choice."""
    found: dict[int, list[int]] = {}
    for event in events:
        out: Sequence[TokenOut] = event.tokens if isinstance(event, First) else ()
        for token in event if isinstance(event, list) else out:
            found.setdefault(token.choice, []).append(token.token_id)
    return found


class CountingRunner:
    """A model whose token at position p is p % VOCAB."""

    def run(self, step: Step) -> Tensor:
        positions = [seq.num_computed + 1 for seq in step.decodes]
        positions += [chunk.end for chunk in step.chunks if chunk.is_last]
        return torch.eye(VOCAB)[[p % VOCAB for p in positions]]


class GatedRunner(CountingRunner):
    """Each step waits until the test lets it go, or makes it raise."""

    def __init__(self) -> None:
        self._entered: queue.SimpleQueue[Step] = queue.SimpleQueue()
        self._verdicts: queue.SimpleQueue[BaseException | None] = queue.SimpleQueue()
        self._is_open = False

    def run(self, step: Step) -> Tensor:
        if not self._is_open:
            self._entered.put(step)
            verdict = self._verdicts.get()
            if verdict is not None:
                raise verdict
        return super().run(step)

    def step(self) -> Step:
        """Wait until the engine is inside a step."""
        return self._entered.get(timeout=WAIT_S)

    def go(self, error: BaseException | None = None) -> None:
        """Let the step that waits end, or raise `error`."""
        self._verdicts.put(error)

    def open(self) -> None:
        """Let this and all later steps pass."""
        self._is_open = True
        self._verdicts.put(None)


def settle(engine: Engine) -> None:
    """Return when the engine has handled every message posted before."""
    probe = Client(make_work([VOCAB]))  # refused at once: its token is outside the vocabulary
    engine.submit(probe.group)
    probe.error()
    engine.release(probe.group)


def assert_empty(pool: BlockPool) -> None:
    """Nothing is owned, nothing is promised, nothing is lost."""
    pool.check_integrity()
    counts = pool.counts()
    assert (0, 0, 0) == (counts.live, counts.promised, counts.leaked)

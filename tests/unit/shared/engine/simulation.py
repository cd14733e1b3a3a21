"""A pretended model for scheduler tests: it knows what every slot must hold and who may write it.

KV of a position depends on all tokens up to it, so a slot's content is the hash of that prefix. Every step checks
what it reads, and that what it writes belongs to one owner alone.
"""

from __future__ import annotations

import random
from dataclasses import dataclass, field

import torch

from shared.engine.blocks import BlockPool
from shared.engine.output import OutputStep
from shared.engine.scheduler import Scheduler
from shared.engine.sequence import Admitted, Event, Failed, Group, Mode, Sequence, State
from shared.engine.step import Chunk, Limits, Step
from shared.errors import ServingError
from shared.wire import Finish
from tests.unit.shared.engine.helpers import make_work

END_TOKEN = 7
VOCAB = 8


@dataclass
class Request:
    """A group, what it was told, and how far its prompt has come."""

    group: Group
    events: list[Event] = field(default_factory=list)
    next_position: int | None = None
    was_released: bool = False

    @property
    def admitted(self) -> Admitted | None:
        return next((e for e in self.events if isinstance(e, Admitted)), None)


class Simulation:
    """Scheduler and output step over pretended KV; `now` is the clock."""

    def __init__(self, num_blocks: int, block_size: int, limits: Limits, seed: int) -> None:
        self.pool = BlockPool(num_blocks, block_size)
        self.scheduler = Scheduler(self.pool, limits)
        self.now = 0.0
        self.requests: list[Request] = []
        self._rng = random.Random(seed)
        self._output = OutputStep(self.scheduler, frozenset([END_TOKEN]), lambda: self.now)
        self._kv: list[list[int | None]] = [[None] * block_size for _ in range(num_blocks)]

    # -- what can happen

    def arrive(self, token_ids: list[int], mode: Mode, num_choices: int, max_tokens: int, ttl: float) -> None:
        """Submit a request that lives until now + ttl."""
        work = make_work(token_ids, num_choices=num_choices, max_tokens=max_tokens)
        group = Group(work, mode, self.now + ttl, lambda _: None, submitted_at=self.now)
        request = Request(group)
        group.deliver = request.events.append
        self.requests.append(request)
        try:
            self.scheduler.check(group)
        except ServingError as exc:
            self.scheduler.fail(group, exc)
        else:
            self.scheduler.add(group)

    def receive(self, request: Request) -> None:
        """KV comes from elsewhere, with a first token for each choice."""
        group = request.group
        if group.state is not State.RECEIVING:
            return
        group.ready_at = self.now
        for position in range(group.num_cached, len(group.token_ids)):
            self._write(group.blocks, group.token_ids, position)
        self.scheduler.received(group)
        wants_more = group.work.max_new_tokens > 1
        tokens = {choice: self._rng.randrange(VOCAB) for choice in group.choices}
        self.scheduler.fork(group, {c: t for c, t in tokens.items() if t != END_TOKEN and wants_more})
        self._output.retire(group)

    def stop(self, request: Request, choice: int) -> None:
        """The router found a stop string."""
        self._output.stop_choices(request.group, [choice])

    def release(self, request: Request) -> None:
        """Nobody needs the request any more. A prompt that is held must be whole until then."""
        group = request.group
        if group.state is State.HELD:
            self._check_prefix(group.blocks, group.token_ids, len(group.token_ids))
        self.scheduler.release(group)
        request.was_released = True

    def step(self) -> bool:
        """One turn of the engine; False when there was nothing to run."""
        self.scheduler.expire(self.now)
        self.scheduler.admit()
        step = self.scheduler.schedule()
        self._run(step)
        return bool(step)

    # -- what must be true

    def check(self) -> None:
        """Bookkeeping is sound, and admission was first come, first served."""
        self.pool.check_integrity()
        admitted = [r for r in self.requests if r.admitted is not None]
        passed = self.requests[: self.requests.index(admitted[-1])] if admitted else []
        assert not any(r.group.state is State.WAITING for r in passed), "a later request was admitted first"
        for request in self.requests:
            ends = [e for e in request.events if isinstance(e, Finish | Failed)]
            assert len(ends) <= 1, "a request ended twice"
            if ends and not isinstance(ends[0], Failed):
                assert ends[0] is request.events[-1]

    def _run(self, step: Step) -> None:
        limit = self.scheduler.limits.chunk_size
        assert not limit or sum(c.end - c.start for c in step.chunks) <= limit
        sources = [list(self._kv[source]) for source, _ in step.copies]
        for content, (_, target) in zip(sources, step.copies, strict=True):
            self._kv[target] = content
        for seq in step.decodes:
            tokens = [*seq.group.token_ids[: seq.group.num_prompt_tokens], *seq.outputs]
            assert len(tokens) - 1 == seq.num_computed, "a position was skipped or computed twice"
            self._check_prefix(seq.table, tokens, seq.num_computed)
            self._write(seq.table, tokens, seq.num_computed)
        for chunk in step.chunks:
            self._run_chunk(chunk)
        rows = [self._rng.randrange(VOCAB) for _ in step.decodes]
        rows += [self._rng.randrange(VOCAB) for c in step.chunks if c.is_last]
        self._output.apply(step, torch.eye(VOCAB)[rows])
        self._check_sequences(step.decodes)

    def _run_chunk(self, chunk: Chunk) -> None:
        group = chunk.group
        request = next(r for r in self.requests if r.group is group)
        if request.next_position is None:
            request.next_position = group.num_cached
        assert request.next_position == chunk.start < chunk.end <= len(group.token_ids)
        request.next_position = chunk.end
        self._check_prefix(group.blocks, group.token_ids, chunk.start)
        for position in range(chunk.start, chunk.end):
            self._write(group.blocks, group.token_ids, position)

    def _check_sequences(self, sequences: list[Sequence]) -> None:
        for seq in sequences:
            assert len(seq.outputs) <= seq.group.sampling.max_tokens

    def _check_prefix(self, table: list[int], tokens: list[int], end: int) -> None:
        size, value = self.pool.block_size, 0
        for position in range(end):
            value = hash((value, tokens[position]))
            assert value == self._kv[table[position // size]][position % size], "foreign or missing KV"

    def _write(self, table: list[int], tokens: list[int], position: int) -> None:
        size, value = self.pool.block_size, 0
        block = table[position // size]
        assert 1 == self.pool.owners(block), "a block with another owner was written"
        for token in tokens[: position + 1]:
            value = hash((value, token))
        self._kv[block][position % size] = value

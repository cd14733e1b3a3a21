"""A scheduler, and groups for it, without an engine."""

from __future__ import annotations

from typing import Any

from shared.engine.blocks import BlockPool
from shared.engine.scheduler import Scheduler
from shared.engine.sequence import Event, Group, Mode
from shared.engine.step import Chunk, Limits
from tests.unit.shared.engine.helpers import VOCAB, make_limits, make_work

FOREVER = 1e9


def make_scheduler(num_blocks: int = 32, block_size: int = 4, limits: Limits | None = None) -> Scheduler:
    """Thirty-two blocks of four, unless told otherwise."""
    return Scheduler(BlockPool(num_blocks, block_size), limits or make_limits())


def make_group(
    num_tokens: int,
    mode: Mode = Mode.LOCAL,
    *,
    n: int = 1,
    deadline: float = FOREVER,
    first_token: int = 0,
    **sampling: Any,
) -> tuple[Group, list[Event]]:
    """A group whose prompt counts up from `first_token`, and the events that it gets."""
    events: list[Event] = []
    tokens = [(first_token + i) % VOCAB for i in range(num_tokens)]
    return Group(make_work(tokens, num_choices=n, **sampling), mode, deadline, events.append), events


def compute_prompt(scheduler: Scheduler, group: Group) -> None:
    """Admit the group and pretend that its whole prompt ran."""
    scheduler.add(group)
    scheduler.admit()
    scheduler.prompt_computed(Chunk(group, group.num_computed, len(group.token_ids)))

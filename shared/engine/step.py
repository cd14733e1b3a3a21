"""What a step of the engine is: which tokens of which groups run in one forward pass, and within which limits."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from shared.engine.sequence import Group, Sequence


@dataclass(frozen=True)
class Limits:
    """chunk_size: prompt tokens a step, 0 = one whole prompt a step. max_num_seqs: choices admitted at a time.

    queue_timeout_s: longest wait for blocks, after which a request is better tried elsewhere or later.
    """

    chunk_size: int
    max_num_seqs: int
    max_queued: int
    max_model_len: int
    vocab_size: int
    queue_timeout_s: float = math.inf


@dataclass(frozen=True)
class Chunk:
    """Prompt positions [start, end) of a group. The last one ends at len(token_ids)."""

    group: Group
    start: int
    end: int

    @property
    def is_last(self) -> bool:
        return self.end == len(self.group.token_ids)

    @property
    def num_logits(self) -> int:
        """How many of its last rows need logits."""
        return self.end - self.start if self.group.is_scored else int(self.is_last)


@dataclass
class Step:
    """One forward pass. copies: (from, to) blocks to duplicate first (copy-on-write)."""

    decodes: list[Sequence] = field(default_factory=list)
    chunks: list[Chunk] = field(default_factory=list)
    copies: list[tuple[int, int]] = field(default_factory=list)

    def __bool__(self) -> bool:
        return bool(self.decodes or self.chunks)

    @property
    def groups(self) -> list[Group]:
        """Every group that takes part, once."""
        seen = {id(g): g for g in [c.group for c in self.chunks] + [s.group for s in self.decodes]}
        return list(seen.values())

    @property
    def is_abandoned(self) -> bool:
        """Nobody waits for any result of this step any more."""
        return all(group.cancelled for group in self.groups)

    @property
    def is_told(self) -> bool:
        """Whether senders were told of layers that this step has written, so that they may be reading them."""
        senders = (chunk.group.progress for chunk in self.chunks)
        return any(progress is not None and progress.is_amid_layers for progress in senders)

    def by_group(self) -> list[Step]:
        """One step for each group, for when all together do not fit. Copies are left to the caller."""
        return [
            Step(
                decodes=[seq for seq in self.decodes if seq.group is group],
                chunks=[chunk for chunk in self.chunks if chunk.group is group],
            )
            for group in self.groups
        ]

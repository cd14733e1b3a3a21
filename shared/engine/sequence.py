"""What the engine knows about a request: the group (one prompt) and its sequences (one choice each).

A group's way, by mode:

    PREFILL   waiting -> prompt -> held (blocks kept until the sender is done) -> ended
    RECEIVE   waiting -> receiving (blocks reserved, KV on its way) -> running -> ended
    LOCAL     waiting -> prompt -> running -> ended

Any state may go to ended at once (cancel, deadline, fault). Ended means: no more compute. Blocks that others
may still read or write (sender, receiver) are freed by the owner's `release`, never before.
Only the engine thread writes these; `cancelled` is the one flag that others may set.
"""

from __future__ import annotations

from collections import abc
from dataclasses import dataclass, field
from enum import Enum
from functools import cached_property
from typing import Protocol

from shared.engine.blocks import Lease
from shared.engine.grammar import GrammarState
from shared.errors import ServingError
from shared.wire import Finish, FinishReason, First, Logprobs, Sampling, TokenOut, Work


class Mode(Enum):
    """Where the prompt's KV comes from and where it goes."""

    PREFILL = "prefill"
    RECEIVE = "receive"
    LOCAL = "local"


class State(Enum):
    """See the module's picture."""

    WAITING = "waiting"
    RECEIVING = "receiving"
    PROMPT = "prompt"
    HELD = "held"
    RUNNING = "running"
    ENDED = "ended"


@dataclass(frozen=True)
class Admitted:
    """Blocks are granted. cached_tokens: leading tokens whose KV is already here; blocks: the prompt's table."""

    cached_tokens: int
    blocks: tuple[int, ...]


@dataclass(frozen=True)
class Failed:
    """The request ended without an answer."""

    error: ServingError


@dataclass(frozen=True)
class PromptScores:
    """Logprobs of the prompt's next tokens, in order; those of position 1 come first."""

    logprobs: list[Logprobs]


Event = Admitted | PromptScores | First | list[TokenOut] | Finish | Failed


class PromptProgress(Protocol):
    """Told by the engine thread how far a prompt is; must not block. Source: shared.kv.progress.Progress."""

    def advance(self, num_computed: int) -> None:
        """KV of positions [0, num_computed) lies in the pool."""

    def advance_layers(self, num_computed: int, num_layers: int) -> None:
        """So does that of the first `num_layers` layers; told after each layer of the prompt's last chunk."""

    @property
    def is_amid_layers(self) -> bool:
        """Whether the sender was told of layers of a chunk that `advance` has not told of."""
        ...

    def finish(self, first_tokens: abc.Sequence[int], finished: abc.Sequence[bool]) -> None:
        """The first token of each choice is sampled; `finished` says which choices it ended."""

    def cancel(self, reason: str) -> None:
        """KV is not wanted any more."""


@dataclass(eq=False)
class Sequence:
    """One choice after its first token.

    table: block ids; position p lies in table[p // block_size].
    num_computed: positions whose KV is in the pool; the newest token is sampled but not yet run.
    names: chained hashes of the full blocks after the prompt's own full blocks.
    grammar: where it stands after `outputs`; None if it is free.
    """

    group: Group
    choice: int
    table: list[int]
    outputs: list[int]
    num_computed: int
    names: list[bytes] = field(default_factory=list)
    grammar: GrammarState | None = None
    finish_reason: FinishReason | None = None

    @property
    def num_tokens(self) -> int:
        """Prompt and output tokens, the newest included."""
        return self.group.num_prompt_tokens + len(self.outputs)

    def token_at(self, position: int) -> int:
        """Token id at an absolute position."""
        num_prompt = self.group.num_prompt_tokens
        return (
            self.group.token_ids[position] if position < num_prompt else self.outputs[position - num_prompt]
        )


@dataclass(eq=False)
class Group:
    """A request in the engine.

    deadline, and every time below: seconds on the engine's clock.
    deliver: called on the engine thread with each Event, in order; must not block.
    stopped: choices that nobody wants any more, known before they run.
    grammar: where the next token of each choice stands, after what came in with the request.
    is_exact: its KV was not quantised on the way. If it was, the prefix cache never learns of it.
    """

    work: Work
    mode: Mode
    deadline: float
    deliver: abc.Callable[[Event], None]
    progress: PromptProgress | None = None
    grammar: GrammarState | None = None
    state: State = State.WAITING
    cancelled: bool = False
    is_exact: bool = True
    lease: Lease | None = None
    blocks: list[int] = field(default_factory=list)
    block_names: list[bytes] = field(default_factory=list)
    num_cached: int = 0
    num_computed: int = 0
    sequences: list[Sequence] = field(default_factory=list)
    stopped: set[int] = field(default_factory=set)
    num_output_tokens: int = 0
    submitted_at: float = 0.0
    prompt_started_at: float | None = None
    ready_at: float = 0.0
    decode_started_at: float | None = None

    @property
    def id(self) -> str:
        return self.work.request_id

    @property
    def sampling(self) -> Sampling:
        return self.work.sampling

    @property
    def token_ids(self) -> list[int]:
        """Everything known at submission: the prompt, and after a lost worker what was generated before."""
        return self.work.token_ids

    @property
    def num_prompt_tokens(self) -> int:
        return self.work.num_prompt_tokens

    @property
    def choices(self) -> range:
        return range(self.work.first_choice, self.work.first_choice + self.work.num_choices)

    @property
    def is_scored(self) -> bool:
        """Are the prompt's own logprobs wanted from here? Then every row of it needs logits."""
        wanted = self.sampling.num_prompt_logprobs is not None and not self.earlier_outputs
        return wanted and self.mode is not Mode.RECEIVE

    @cached_property
    def prompt_ids(self) -> list[int]:
        """The prompt alone."""
        return self.work.token_ids[: self.work.num_prompt_tokens]

    @property
    def earlier_outputs(self) -> list[int]:
        """Generated tokens that came in with the request (resume)."""
        return self.work.token_ids[self.work.num_prompt_tokens :]

    def running(self) -> list[Sequence]:
        """Sequences that still want tokens."""
        return [seq for seq in self.sequences if seq.finish_reason is None]

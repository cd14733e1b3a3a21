"""What to send and when: prompts of a given length, arrival times, and the replay of traces. Seeded, no I/O.

Length is exact for prompts of token ids (`/v1/completions`), which need no tokenizer; prompts of words are
close, and the server's `usage` says how close.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

from loadtest.client import Request
from loadtest.traces import Scale, TraceRow

BYTE_IDS = range(256)
"""Ids that every byte-level BPE vocabulary has (Qwen, Llama 3, ...): its single bytes."""

_WORDS = (
    "the of and to in is was for on with as by at from this that it be are or an which you not have had "
    "one all can will there their more when out so up about time people water way could first work new "
    "little place year good man day most great old right thing line small end large name here say boy"
)


@dataclass(frozen=True, slots=True)
class Timed:
    """A request and when it is due, in seconds from the start of the run."""

    due_s: float
    request: Request


@dataclass(frozen=True, slots=True)
class Replay:
    """A trace made into requests, and its real scale: whole tokens are not quite `scale`."""

    requests: tuple[Timed, ...]
    scale: Scale
    prompt_tokens_ratio: float
    output_tokens_ratio: float

    def to_dict(self) -> dict[str, float]:
        """For the report: asked and real scale."""
        return {
            "time_scale": self.scale.time,
            "length_scale": self.scale.length,
            "prompt_tokens_ratio": round(self.prompt_tokens_ratio, 5),
            "output_tokens_ratio": round(self.output_tokens_ratio, 5),
        }


def random_ids(num_tokens: int, seed: str, ids: range = BYTE_IDS) -> tuple[int, ...]:
    """Exactly num_tokens ids out of `ids`; a function of the seed and the length."""
    return tuple(random.Random(seed).choices(ids, k=num_tokens))


def random_words(num_tokens: int, seed: str) -> str:
    """About num_tokens tokens of short, common words, each of which is one token in common vocabularies."""
    return " ".join(random.Random(seed).choices(_WORDS.split(), k=num_tokens))


def synthetic(
    *, prompt_tokens: int, max_tokens: int, seed: int = 0, chat: bool = False, ids: range = BYTE_IDS
) -> Iterator[Request]:
    """Requests without end, all of one length and no two alike, so that no prefix cache flatters them."""
    number = 0
    while True:
        key = f"{seed}/{number}"
        prompt = random_words(prompt_tokens, key) if chat else random_ids(prompt_tokens, key, ids)
        yield Request(prompt, max_tokens, chat)
        number += 1


def poisson(requests: Iterable[Request], *, rate_per_s: float, seed: int = 0) -> Iterator[Timed]:
    """Due times of a Poisson process: independent exponential gaps of mean 1 / rate_per_s."""
    if rate_per_s <= 0:
        raise ValueError("an arrival rate is positive")
    draws = random.Random(f"poisson/{seed}")
    due_s = 0.0
    for request in requests:
        due_s += draws.expovariate(rate_per_s)
        yield Timed(due_s, request)


def replay(rows: Iterable[TraceRow], scale: Scale, *, seed: int = 0, ids: range = BYTE_IDS) -> Replay:
    """Token-id requests with a trace's arrival times and lengths. Equal blocks are equal tokens."""
    originals = list(rows)
    scaled = [scale.apply(row) for row in originals]
    requests = tuple(
        Timed(row.arrival_s, Request(_prompt(row, f"{seed}/{number}", f"{seed}", ids), row.output_tokens))
        for number, row in enumerate(scaled)
    )
    return Replay(
        requests,
        scale,
        _ratio(sum(row.prompt_tokens for row in scaled), sum(row.prompt_tokens for row in originals)),
        _ratio(sum(row.output_tokens for row in scaled), sum(row.output_tokens for row in originals)),
    )


def _prompt(row: TraceRow, key: str, block_key: str, ids: range) -> tuple[int, ...]:
    if row.blocks is None:
        return random_ids(row.prompt_tokens, f"row/{key}", ids)
    tokens = (
        token
        for block in row.blocks
        for token in random_ids(row.block_tokens, f"block/{block_key}/{block}", ids)
    )
    return tuple(tokens)[: row.prompt_tokens]


def _ratio(part: int, whole: int) -> float:
    return part / whole if whole else 0.0

"""Logits for sampler tests, and the plainest reading of what the filters mean."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from shared.engine.sampler import sample
from shared.wire import Logprobs, Sampling


def logits(seed: int, vocab_size: int = 50, spread: float = 3.0) -> Tensor:
    """Random logits without ties."""
    return torch.randn(vocab_size, generator=torch.Generator().manual_seed(seed)) * spread


def draw(
    logits_V: Tensor,
    *,
    choice: int = 0,
    prompt: Sequence[int] = (1, 2, 3),
    outputs: Sequence[int] = (),
    banned: Sequence[int] = (),
    **sampling: Any,
) -> tuple[int, Logprobs | None]:
    """`sample` with a few defaults."""
    wanted = Sampling.model_validate({"max_tokens": 8, **sampling})
    return sample(logits_V, wanted, choice=choice, prompt=prompt, outputs=outputs, banned=banned)


def token(logits_V: Tensor, **options: Any) -> int:
    """The token alone."""
    return draw(logits_V, **options)[0]


def naive_probabilities(
    logits_V: Tensor, *, temperature: float = 1.0, top_k: int = 0, top_p: float = 1.0, min_p: float = 0.0
) -> Tensor:
    """What the request asks for, step by step over the whole vocabulary, in float64.

    top_p is the smallest set of best tokens whose probability, after top_k, reaches p. min_p is relative to the
    best token.
    """
    probabilities = torch.softmax(logits_V.double() / temperature, 0)
    order = probabilities.argsort(descending=True).tolist()
    kept = order[:top_k] if top_k else order
    whole = sum(float(probabilities[t]) for t in kept)
    nucleus: list[int] = []
    mass = 0.0
    for candidate in kept:
        if nucleus and mass >= top_p * whole:
            break
        nucleus.append(candidate)
        mass += float(probabilities[candidate])
    best = float(probabilities[order[0]])
    allowed = [t for t in nucleus if float(probabilities[t]) >= min_p * best]
    result = torch.zeros_like(probabilities)
    result[allowed] = probabilities[allowed]
    return result / result.sum()

"""Logits to tokens. A token is a function of the request and its logits alone.

The random draw is keyed by (seed, choice, position), so batch, worker, retry and topology cannot change it.
Order: repetition, presence, frequency penalty, bias, min_tokens, grammar; log-probabilities are taken here; then
temperature, top_k, top_p, min_p and the draw. Repetition counts prompt and output, the other two output only.
"""

from __future__ import annotations

import hashlib
import math
import struct
from collections import Counter
from collections.abc import Sequence

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from shared.errors import EngineFault
from shared.wire import Logprobs, Sampling

GREEDY_BELOW = 1e-5
"""Temperatures up to this are greedy: the division would overflow long before the result could differ."""

LOGPROB_FLOOR = -9999.0
"""Stands for minus infinity, which JSON cannot say."""

_LARGEST = 1e38
"""Bound of what a request's penalties and bias can make of a logit: two of them still add up to a float32."""

_TOP_P_FIRST_TRY = 512


def uniform(seed: int, choice: int, position: int) -> float:
    """A number in [0, 1) with 53 random bits that depends on its three arguments only."""
    digest = hashlib.blake2b(struct.pack("<QQQ", seed, choice, position), digest_size=8).digest()
    return float(int.from_bytes(digest, "little") >> 11) * 2.0**-53


def sample(
    logits_V: Tensor,
    sampling: Sampling,
    *,
    choice: int,
    prompt: Sequence[int],
    outputs: Sequence[int],
    banned: Sequence[int],
    allowed: NDArray[np.bool_] | None = None,
) -> tuple[int, Logprobs | None]:
    """Draw the token at position len(prompt) + len(outputs).

    logits_V: (V,) float32; not changed. banned: end tokens that are not allowed yet (min_tokens).
    allowed: (V,), False for every token that the grammar rules out; None without one.
    Raises EngineFault if the logits are not numbers, or rule out every token.
    """
    # A maximum is NaN or infinite if any logit is; most of the later steps would hide it.
    if not math.isfinite(float(logits_V.max())):
        raise EngineFault("the model produced logits that are not numbers")
    logits_V = _adjust(logits_V, sampling, prompt, outputs, banned)
    if allowed is not None:
        logits_V = torch.where(torch.from_numpy(allowed).to(logits_V.device), logits_V, -math.inf)
    if sampling.temperature <= GREEDY_BELOW or sampling.top_k == 1 or sampling.top_p == 0:
        token = int(torch.argmax(logits_V))
    else:
        position = len(prompt) + len(outputs)
        token = _draw(logits_V, sampling, uniform(sampling.seed, choice, position))
    if not math.isfinite(float(logits_V[token])):
        raise EngineFault("the model leaves no token that may be drawn")
    return token, _logprobs(logits_V, token, sampling.num_logprobs)


def _adjust(
    logits_V: Tensor, sampling: Sampling, prompt: Sequence[int], outputs: Sequence[int], banned: Sequence[int]
) -> Tensor:
    """A changed copy, or the same tensor when nothing applies."""
    counts_output = sampling.presence_penalty != 0 or sampling.frequency_penalty != 0
    if sampling.repetition_penalty == 1 and not counts_output and not sampling.logit_bias and not banned:
        return logits_V
    logits_V = logits_V.clone()
    device = logits_V.device
    if sampling.repetition_penalty != 1:
        seen = torch.tensor(sorted({*prompt, *outputs}), device=device)
        values = logits_V[seen]
        penalty = sampling.repetition_penalty
        penalised = torch.where(values > 0, values / penalty, values * penalty)
        logits_V[seen] = penalised.clamp_(-_LARGEST, _LARGEST)
    if counts_output and outputs:
        counts = Counter(outputs)
        seen = torch.tensor(list(counts), device=device)
        times = torch.tensor(list(counts.values()), dtype=logits_V.dtype, device=device)
        logits_V[seen] -= sampling.presence_penalty + sampling.frequency_penalty * times
    if sampling.logit_bias:
        biased = torch.tensor(list(sampling.logit_bias), device=device)
        bias = torch.tensor(list(sampling.logit_bias.values()), device=device)
        logits_V[biased] += bias.clamp_(-_LARGEST, _LARGEST)
    if banned:
        logits_V[torch.tensor(list(banned), device=device)] = -math.inf
    return logits_V


def _draw(logits_V: Tensor, sampling: Sampling, u: float) -> int:
    """Inverse of the cumulative distribution at `u`, over what top_k, top_p and min_p leave."""
    top = logits_V.max()
    scaled_V = (logits_V - top).div_(sampling.temperature)
    if sampling.top_k == 0 and sampling.top_p >= 1 and sampling.min_p == 0:
        return _invert(scaled_V.double().exp_(), u)
    weights, tokens = _candidates(scaled_V, sampling)
    return int(tokens[_invert(weights, u)])


def _candidates(scaled_V: Tensor, sampling: Sampling) -> tuple[Tensor, Tensor]:
    """Weights (float64, best first, not normalised) and ids of the tokens that may be drawn."""
    num_tokens = scaled_V.numel()
    if sampling.top_k:
        values, tokens = scaled_V.topk(min(sampling.top_k, num_tokens))
        weights = values.double().exp_()
        total = weights.sum()
    else:
        total = scaled_V.double().exp_().sum()
        # Sorting 150,000 values costs more than a layer; the nucleus is nearly always in the first hundreds.
        values, tokens = scaled_V.topk(min(_TOP_P_FIRST_TRY, num_tokens))
        weights = values.double().exp_()
        nucleus_is_cut = sampling.top_p < 1 and weights.sum() < sampling.top_p * total
        if nucleus_is_cut or (sampling.min_p > 0 and weights[-1] >= sampling.min_p):
            values, tokens = scaled_V.sort(descending=True, stable=True)
            weights = values.double().exp_()
    if sampling.top_p < 1:
        before = weights.cumsum(0) - weights
        weights = weights[: max(1, int((before < sampling.top_p * total).sum()))]
    if sampling.min_p > 0:
        # The best token's weight is exp(0) = 1.
        weights = weights[: max(1, int((weights >= sampling.min_p).sum()))]
    return weights, tokens[: weights.numel()]


def _invert(weights: Tensor, u: float) -> int:
    """First index whose cumulative weight exceeds u * total; never one of zero weight."""
    cumulative = weights.cumsum(0)
    index = int(torch.searchsorted(cumulative, u * cumulative[-1], right=True))
    return min(index, int(torch.count_nonzero(cumulative < cumulative[-1])))


def _logprobs(logits_V: Tensor, token: int, num_logprobs: int | None) -> Logprobs | None:
    if num_logprobs is None:
        return None
    logprobs_V = torch.log_softmax(logits_V, dim=0)
    top: list[tuple[int, float]] = []
    if num_logprobs:
        values, tokens = logprobs_V.topk(min(num_logprobs, logprobs_V.numel()))
        pairs = zip(tokens.tolist(), values.tolist(), strict=True)
        top = [(t, max(v, LOGPROB_FLOOR)) for t, v in pairs]
    return Logprobs(token=max(float(logprobs_V[token]), LOGPROB_FLOOR), top=top)

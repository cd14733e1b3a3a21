"""Logprobs of a prompt's own tokens, from the logits of the rows before them."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from shared.engine.sampler import LOGPROB_FLOOR
from shared.errors import EngineFault
from shared.wire import Logprobs

ROWS_AT_A_TIME = 16
"""Bounds the log-probabilities that exist at once: 10 MB of them for a vocabulary of 150,000."""


def score_prompt(logits_TV: Tensor, targets: Sequence[int], num_top: int) -> list[Logprobs]:
    """What each row says about the token that really came next: raw, neither penalties nor biases applied.

    logits_TV: (T, V), one row for each of `targets`. num_top: how many of the best to name beside it.
    Raises EngineFault if the logits are not numbers.
    """
    scores: list[Logprobs] = []
    for start in range(0, len(targets), ROWS_AT_A_TIME):
        next_ids = torch.tensor(targets[start : start + ROWS_AT_A_TIME], device=logits_TV.device)
        logprobs_TV = torch.log_softmax(logits_TV[start : start + len(next_ids)].float(), dim=-1)
        chosen = logprobs_TV.gather(1, next_ids[:, None])[:, 0].tolist()
        values, tokens = logprobs_TV.topk(min(num_top, logprobs_TV.shape[1]), dim=-1)
        if any(math.isnan(logprob) for logprob in chosen):
            raise EngineFault("the model produced logits that are not numbers")
        for logprob, ids, best in zip(chosen, tokens.tolist(), values.tolist(), strict=True):
            top = [(i, max(value, LOGPROB_FLOOR)) for i, value in zip(ids, best, strict=True)]
            scores.append(Logprobs(token=max(logprob, LOGPROB_FLOOR), top=top))
    return scores

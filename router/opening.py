"""What a worker says of a prompt first: its logprobs, if wanted, and the first token of every choice."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from router.legs import AnyLeg, Arrival, Inbox, LegFailed
from shared.errors import BackendError
from shared.wire import First, Logprobs


@dataclass(frozen=True, slots=True)
class Opening:
    """prompt_logprobs: of positions 1, 2, ... of the prompt."""

    first: First
    prompt_logprobs: list[Logprobs] = field(default_factory=list)


async def take_opening(inbox: Inbox, leg: AnyLeg, within_s: float, early: deque[Arrival]) -> Opening:
    """Wait for the leg's first tokens, each of its events within `within_s`.

    Another leg can overtake it, on its own connection; its events are kept in `early`. Raises LegFailed.
    """
    scores: list[Logprobs] = []
    while True:
        arrival = await inbox.take(within_s, leg)
        event = arrival.event
        if arrival.leg is not leg:
            early.append(arrival)
        elif event.prompt_logprobs is not None:
            scores += event.prompt_logprobs
        elif event.first is not None:
            return Opening(event.first, scores)
        else:
            raise LegFailed(leg, BackendError(f"{leg.worker.name} answered out of turn"))

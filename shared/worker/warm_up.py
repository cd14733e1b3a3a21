"""The first request of a worker, made by itself: a prompt of many tokens, then a decode step.

Prompt and decode take different ways through attention and matrix products; a prompt of one token would take one.
"""

from __future__ import annotations

import time

import structlog

from shared.engine.sequence import Mode
from shared.wire import Finish, Sampling, Work
from shared.worker.assemble import Worker
from shared.worker.stream import EngineRequest

log = structlog.get_logger()

WARM_UP_TOKENS = 40
_TIMEOUT_S = 300.0


async def warm_up(worker: Worker) -> None:
    """Raises ServingError if the engine cannot serve."""
    started = time.monotonic()
    longest = worker.limits.max_model_len
    num_tokens = max(1, min(WARM_UP_TOKENS, longest - 2))
    work = Work(
        request_id="warm-up",
        token_ids=[position % 97 for position in range(num_tokens)],
        num_prompt_tokens=num_tokens,
        sampling=Sampling(max_tokens=min(2, longest - num_tokens), temperature=0, ignore_eos=True),
        timeout_s=_TIMEOUT_S,
    )
    request = EngineRequest(worker.engine, work, Mode.LOCAL)
    try:
        while not isinstance(await request.next(), Finish):
            pass
    finally:
        request.close()
    log.info("warm", duration_s=round(time.monotonic() - started, 3))

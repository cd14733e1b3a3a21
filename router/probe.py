"""Readiness told by proof: each pair of workers answers two tokens once, so KV has really moved between them.
Where workers take two tokens in all, it is one.

The proof holds for a pair of boots; a restarted worker has to prove itself again. Probes run beside the requests
and gate none: they only decide what /ready says.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from time import perf_counter

import structlog

from router.course import Job
from router.fleet import Fleet
from router.relay import Dispatcher
from router.workers.registry import Registry
from router.workers.state import Worker
from shared.asgi.context import new_request_id
from shared.errors import ServingError
from shared.wire import Sampling

PROBE_TOKENS = 40  # more than two blocks of any usual size
ANSWER_TOKENS = 2  # the second one is decoded from KV that has moved
_log = structlog.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class _Pinned:
    """A roster of one pair."""

    registry: Registry
    pair: tuple[Worker | None, Worker]

    @property
    def unified(self) -> bool:
        return self.pair[0] is None

    def prefill(self) -> Sequence[Worker]:
        return [w for w in self.pair[:1] if w is not None and w.usable]

    def decode(self) -> Sequence[Worker]:
        return [self.pair[1]] if self.pair[1].usable else []

    async def changed(self, *, within_s: float) -> bool:
        return await self.registry.changed(within_s=within_s)


class Prober:
    """`run` proves pairs until it is cancelled."""

    def __init__(self, fleet: Fleet, registry: Registry) -> None:
        self._fleet = replace(fleet, settings=fleet.settings.model_copy(update={"max_tries": 1}))
        self._registry = registry
        self._proven: set[tuple[str | None, str]] = set()
        self.last_error: str | None = None

    @property
    def ready(self) -> bool:
        """Is there a usable pair that has proved itself?"""
        return any(_boots(pair) in self._proven for pair in self._registry.pairs())

    async def run(self) -> None:
        """Prove every usable pair, then wait for news; what failed is tried again at the next look."""
        interval_s = self._fleet.settings.health_interval_s
        while True:
            self._forget_ended_boots()
            for pair in self._registry.pairs():
                if _boots(pair) not in self._proven:
                    await self._prove(pair)
            await self._registry.changed(within_s=interval_s)

    def _forget_ended_boots(self) -> None:
        """Not those of workers that are merely unusable: who missed a look or is full is still who it was."""
        boots = {worker.info.boot for worker in self._registry.workers if worker.info is not None}
        self._proven = {pair for pair in self._proven if boots.issuperset(boot for boot in pair if boot)}

    async def _prove(self, pair: tuple[Worker | None, Worker]) -> None:
        boots = _boots(pair)
        num_prompt, num_answer = probe_lengths(_max_model_len(pair))
        job = Job(
            request_id=new_request_id(),
            token_ids=list(range(1, num_prompt + 1)),
            num_choices=1,
            sampling=Sampling(temperature=0.0, max_tokens=num_answer, ignore_eos=True),
            timeout_s=self._fleet.settings.probe_timeout_s,
            started=perf_counter(),
        )
        dispatcher = Dispatcher(replace(self._fleet, registry=_Pinned(self._registry, pair)))
        num_tokens = 0
        try:
            async with dispatcher.relay(job) as relay:
                async for tokens in relay:
                    num_tokens += len(tokens)
        except ServingError as exc:
            self.last_error = exc.message
            _log.warning("probe_failed", decode=pair[1].name, code=exc.code, error=exc.message)
        else:
            assert num_tokens == num_answer, "a relay that ends well has brought every token"
            self._proven.add(boots)
            self.last_error = None
            _log.info(
                "pair_proven",
                prefill=pair[0].name if pair[0] is not None else None,
                decode=pair[1].name,
                kv_bytes=relay.report.way.kv_bytes,
            )
        finally:
            await dispatcher.aclose()


def probe_lengths(max_model_len: int) -> tuple[int, int]:
    """Tokens of prompt and answer that a pair proves itself with; at least one each. max_model_len: 2 or more."""
    num_prompt = max(1, min(PROBE_TOKENS, max_model_len - ANSWER_TOKENS))
    return num_prompt, min(ANSWER_TOKENS, max_model_len - num_prompt)


def _max_model_len(pair: tuple[Worker | None, Worker]) -> int:
    """What both take; without what they say of themselves, room for a whole probe."""
    lengths = [w.info.max_model_len for w in pair if w is not None and w.info is not None]
    return min(lengths, default=PROBE_TOKENS + ANSWER_TOKENS)


def _boots(pair: tuple[Worker | None, Worker]) -> tuple[str | None, str]:
    prefill, decode = pair
    return (
        prefill.info.boot if prefill is not None and prefill.info is not None else None,
        decode.info.boot if decode.info is not None else "",
    )

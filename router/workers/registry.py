"""All workers of one router and the tasks that look at each of them.

A worker gets work when it answered the last look, is ready and not draining, speaks our protocol in its role, and
has the router's own tokenizer. A connection that breaks takes it out at once; the next good look brings it back.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from typing import Any

from router.workers.client import WorkerClient
from router.workers.state import Worker
from shared.errors import ServingError
from shared.pool_size import PoolSize
from shared.wire import PROTOCOL_VERSION, WorkerInfo

_SOON_S = 0.5
"""Between two looks at a worker that is not usable: whoever waits for it should not wait for us."""


class Registry:
    """Knows the workers. `run` keeps the knowledge fresh until it is cancelled."""

    def __init__(
        self,
        client: WorkerClient,
        *,
        prefill_urls: Iterable[str],
        decode_urls: Iterable[str],
        interval_s: float,
        tokenizer_digest: str | None = None,
    ) -> None:
        self._client = client
        self._interval_s = interval_s
        self._tokenizer_digest = tokenizer_digest
        self._changed = asyncio.Event()
        self._prefill = tuple(Worker("prefill", url, self._announce) for url in prefill_urls)
        self._decode = tuple(Worker("decode", url, self._announce) for url in decode_urls)

    @property
    def unified(self) -> bool:
        """Without any prefill worker configured, decode workers compute the prompts."""
        return not self._prefill

    @property
    def workers(self) -> tuple[Worker, ...]:
        """Every configured worker, prefill first."""
        return self._prefill + self._decode

    def prefill(self) -> Sequence[Worker]:
        """Usable prefill workers, in configured order."""
        return [w for w in self._prefill if w.usable]

    def decode(self) -> Sequence[Worker]:
        """Usable decode workers, in configured order."""
        return [w for w in self._decode if w.usable]

    def pairs(self) -> list[tuple[Worker | None, Worker]]:
        """Usable pairs whose KV fits together; in unified mode every decode worker by itself."""
        if self.unified:
            return [(None, d) for d in self.decode()]
        return [
            (p, d)
            for p in self.prefill()
            for d in self.decode()
            if not p.fingerprint.differences(d.fingerprint)
        ]

    def max_model_len(self) -> int | None:
        """Longest prompt plus answer that every usable worker can take; None while there is none."""
        lengths = [w.info.max_model_len for w in (*self.prefill(), *self.decode()) if w.info is not None]
        return min(lengths, default=None)

    def pools(self) -> frozenset[PoolSize]:
        """Where answers can be generated now; none while there is no usable pair."""
        return frozenset(decode.pool for _, decode in self.pairs())

    async def changed(self, *, within_s: float) -> bool:
        """Wait until anything about any worker changes; False if nothing did in time."""
        event = self._changed
        try:
            async with asyncio.timeout(within_s):
                await event.wait()
        except TimeoutError:
            return False
        return True

    async def run(self) -> None:
        """Look at every worker, each in its own task, for ever."""
        async with asyncio.TaskGroup() as tasks:
            for worker in self.workers:
                tasks.create_task(self._watch(worker))

    async def look(self, worker: Worker) -> None:
        """Ask one worker how it does and judge the answer."""
        try:
            info = await self._client.info(worker)
        except ServingError as exc:
            worker.missed(exc.message)
        else:
            worker.seen(info, self._judge(worker, info))

    def report(self) -> dict[str, Any]:
        """State of every worker, and why which pair is refused, for /ready. Names, not addresses."""
        return {
            "workers": [
                {
                    "role": w.role,
                    "name": w.name,
                    "usable": w.usable,
                    "problem": w.problem,
                    "outstanding_requests": w.outstanding_requests,
                }
                for w in self.workers
            ],
            "conflicts": [
                {"prefill": p.name, "decode": d.name, "fields": fields}
                for p in self.prefill()
                for d in self.decode()
                if (fields := p.fingerprint.differences(d.fingerprint))
            ],
        }

    def _judge(self, worker: Worker, info: WorkerInfo) -> str | None:
        """Why it gets no work, or None."""
        if info.protocol != PROTOCOL_VERSION:
            return f"speaks protocol {info.protocol}, not {PROTOCOL_VERSION}"
        if info.role != worker.role:
            return f"is a {info.role} worker, not a {worker.role} worker"
        if self._tokenizer_digest is not None and info.fingerprint.tokenizer != self._tokenizer_digest:
            return "its tokenizer differs from the router's"
        if info.draining:
            return "is draining"
        return None if info.ready else "is not ready"

    async def _watch(self, worker: Worker) -> None:
        """Look, then wait for the interval, or until a request loses the worker: then look at once."""
        while True:
            await self.look(worker)
            was_usable = worker.usable
            loop = asyncio.get_running_loop()
            until = loop.time() + (self._interval_s if was_usable else min(self._interval_s, _SOON_S))
            while (left_s := until - loop.time()) > 0 and not (was_usable and not worker.usable):
                await self.changed(within_s=left_s)

    def _announce(self) -> None:
        event, self._changed = self._changed, asyncio.Event()
        event.set()

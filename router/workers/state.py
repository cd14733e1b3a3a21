"""What the router knows of one worker, and the leases that count what it has given it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

from shared.errors import InvariantBroken
from shared.pool_size import PoolSize
from shared.wire import Fingerprint, Role, WorkerInfo


class Worker:
    """One worker address. Changed on the event loop only.

    info: its last answer, None before the first one; kept while it is lost, for its name and fingerprint.
    problem: why it gets no work, in words for /ready; None when it may get some.
    """

    def __init__(self, role: Role, url: str, on_change: Callable[[], None]) -> None:
        self.role: Role = role
        self.url = url
        self.info: WorkerInfo | None = None
        self.problem: str | None = "not seen yet"
        self.missed_looks = 0
        self.outstanding_requests = 0
        self.outstanding_tokens = 0
        self._on_change = on_change
        self._watchers: set[Callable[[], None]] = set()

    @property
    def usable(self) -> bool:
        """May it be given work?"""
        return self.problem is None and self.info is not None

    @property
    def name(self) -> str:
        """Its own name if it is known; never its address, which is nobody's business outside."""
        return self.info.name if self.info is not None else self.role

    @property
    def fingerprint(self) -> Fingerprint:
        """Only of a worker that has been seen."""
        if self.info is None:
            raise InvariantBroken("a worker that was not seen has no fingerprint")
        return self.info.fingerprint

    @property
    def pool(self) -> PoolSize:
        """Only of a worker that has been seen."""
        if self.info is None:
            raise InvariantBroken("a worker that was not seen has no pool")
        return PoolSize(self.info.num_blocks, self.info.block_size)

    def seen(self, info: WorkerInfo, problem: str | None) -> None:
        """Take over a worker's answer and the judgement on it."""
        self.missed_looks = 0
        changed = self.info is None or self.info.boot != info.boot or self.problem != problem
        self.info = info
        self.problem = problem
        if changed:
            self._on_change()

    def lost(self, problem: str) -> None:
        """It cannot be reached: no work until it answers again."""
        changed = self.problem != problem
        self.problem = problem
        if changed:
            self._on_change()

    def missed(self, problem: str) -> None:
        """A look failed. After two in a row whoever still waits for a first word from it is told."""
        self.missed_looks += 1
        self.lost(problem)
        if self.missed_looks >= 2:
            for tell in tuple(self._watchers):
                tell()

    def watch(self, tell: Callable[[], None]) -> None:
        """Have `tell` called when the worker has become silent, until `unwatch`."""
        self._watchers.add(tell)

    def unwatch(self, tell: Callable[[], None]) -> None:
        """It need not be called any more."""
        self._watchers.discard(tell)

    @contextmanager
    def lease(self, tokens: int) -> Iterator[None]:
        """Count one request of `tokens` tokens as outstanding for as long as the context lives."""
        self.outstanding_requests += 1
        self.outstanding_tokens += tokens
        try:
            yield
        finally:
            self.outstanding_requests -= 1
            self.outstanding_tokens -= tokens
            if self.outstanding_requests < 0 or self.outstanding_tokens < 0:
                raise InvariantBroken("a lease was returned twice")

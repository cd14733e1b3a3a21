"""How far prefill has come, told by the engine thread to the thread that sends."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

from shared.errors import BackendTimeout


class TransferCancelled(Exception):
    """The sending side itself called the transfer off. Not an error that anybody is told about."""


@dataclass(frozen=True, slots=True)
class FirstTokens:
    """The first token of each choice, and whether it already ended that choice."""

    token_ids: tuple[int, ...]
    finished: tuple[bool, ...]


class Progress:
    """One hand-off's progress. Any thread may call any method; nothing polls.

    The engine calls `advance` as KV lands in the pool, then `finish` once, or `cancel` at any time.
    A later `finish` or `cancel` than the first one changes nothing.

    marks: after how many layers of the last chunk the sender is told of them; none: only when all have run. Telling
    costs the step a switch of threads, so it is not done for every layer.
    """

    def __init__(self, *, marks: Collection[int] = (), clock: Callable[[], float] = time.monotonic) -> None:
        self._marks = frozenset(marks)
        self._clock = clock
        self._changed = threading.Condition()
        self._num_computed = 0
        self._partly = (0, 0)
        self._first: FirstTokens | None = None
        self._finished_at: float | None = None
        self._cancelled: str | None = None
        self._on_cancel: Callable[[], None] | None = None

    def advance(self, num_computed: int) -> None:
        """KV of positions [0, num_computed) can be read from now on."""
        with self._changed:
            self._num_computed = max(self._num_computed, num_computed)
            self._changed.notify_all()

    def advance_layers(self, num_computed: int, num_layers: int) -> None:
        """KV of positions [0, num_computed) can be read in the first `num_layers` layers; more will follow."""
        if num_layers in self._marks:
            with self._changed:
                self._partly = (num_computed, num_layers)
                self._changed.notify_all()

    @property
    def is_amid_layers(self) -> bool:
        """Whether the sender was told of layers of a chunk that has not run to its end: it may be reading them."""
        with self._changed:
            return self._partly[0] > self._num_computed

    def finish(self, first_tokens: Sequence[int], finished: Sequence[bool]) -> None:
        """The first tokens are sampled; KV of the whole prompt can be read."""
        first = FirstTokens(tuple(first_tokens), tuple(finished))
        with self._changed:
            if self._first is None and self._cancelled is None:
                # In this order: `_wait` looks at `_first` without the lock, and whoever knows it asks for the time.
                self._finished_at = self._clock()
                self._first = first
                self._changed.notify_all()

    def cancel(self, reason: str) -> None:
        """Stop the sender, wherever it blocks. Returns at once."""
        with self._changed:
            if self._cancelled is not None:
                return
            self._cancelled = reason
            self._changed.notify_all()
            if self._on_cancel is not None:
                self._on_cancel()

    @property
    def finished_at(self) -> float | None:
        """When `finish` was called, on this object's clock."""
        return self._finished_at

    def check_cancelled(self) -> None:
        """Raise TransferCancelled if `cancel` was called."""
        if self._cancelled is not None:
            raise TransferCancelled(self._cancelled)

    def wait_layers(self, num_computed: int, num_layers: int, timeout_s: float | None = None) -> bool:
        """Block until KV of [0, num_computed) is there in the first `num_layers` layers; is it in all of them?

        Raises TransferCancelled, BackendTimeout.
        """
        complete = False

        def ready() -> bool:
            nonlocal complete
            complete = self._first is not None or self._num_computed >= num_computed
            return complete or (self._partly[0] >= num_computed and self._partly[1] >= num_layers)

        self._wait(ready, timeout_s)
        return complete

    def wait_finished(self, timeout_s: float | None = None) -> FirstTokens:
        """Block until the first tokens are sampled. Raises TransferCancelled, BackendTimeout."""
        self._wait(lambda: self._first is not None, timeout_s)
        assert self._first is not None
        return self._first

    @contextmanager
    def interrupting(self, callback: Callable[[], None]) -> Iterator[None]:
        """Within the block, `cancel` also calls `callback` (which must not block); never after it.

        Raises TransferCancelled if it is already too late.
        """
        with self._changed:
            self.check_cancelled()
            self._on_cancel = callback
        try:
            yield
        finally:
            with self._changed:
                self._on_cancel = None

    def _wait(self, ready: Callable[[], bool], timeout_s: float | None) -> None:
        # What is true once stays true, so most calls need no lock.
        if not ready():
            with self._changed:
                if not self._changed.wait_for(lambda: self._cancelled is not None or ready(), timeout_s):
                    raise BackendTimeout("prefill did not compute the KV in its time")
        self.check_cancelled()

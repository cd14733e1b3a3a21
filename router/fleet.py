"""What every try needs of the router's surroundings, and the one way to get a placement out of them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from time import perf_counter
from typing import Protocol, TypeVar

from router.course import Course
from router.policy import LeastOutstanding
from router.settings import RouterSettings
from router.workers.client import WorkerClient
from router.workers.state import Worker
from shared.errors import Overloaded, ServingError, Unavailable

T = TypeVar("T")


class Roster(Protocol):
    """The workers that may be chosen now; see Registry."""

    @property
    def unified(self) -> bool: ...
    def prefill(self) -> Sequence[Worker]: ...
    def decode(self) -> Sequence[Worker]: ...
    async def changed(self, *, within_s: float) -> bool: ...


@dataclass(frozen=True, slots=True)
class Fleet:
    """The workers and how to reach and choose them."""

    settings: RouterSettings
    client: WorkerClient
    registry: Roster
    policy: LeastOutstanding[Worker]

    async def place(
        self,
        choose: Callable[[Collection[str]], T | None],
        course: Course,
        group: range,
        refused: Mapping[str, Overloaded],
    ) -> T:
        """What `choose` finds for a group, given the addresses that already refused this try.

        A request that no worker has failed yet is told at once that there is no room or nobody. A broken one
        waits for a worker to come back or to have room, `recovery_wait_s` at most over all calls of this.
        Raises Overloaded, Unavailable, or the error that broke it.
        """
        excluded: Collection[str] = refused
        while (found := self._chosen(choose, course, group, excluded)) is None:
            if course.wait_until is None:
                course.wait_until = perf_counter() + self.settings.recovery_wait_s
            wait_s = min(course.wait_until - perf_counter(), course.left_s)
            if course.last_error is None or wait_s <= 0 or (refused and not course.begun):
                raise self._nobody(course, refused)
            if refused and course.begun:
                wait_s, excluded = min(wait_s, 0.5), ()
            await self.registry.changed(within_s=wait_s)
        return found

    def _chosen(
        self,
        choose: Callable[[Collection[str]], T | None],
        course: Course,
        group: range,
        excluded: Collection[str],
    ) -> T | None:
        """Not at a worker whose pool can never hold the group, as long as others are there or may come back."""
        too_small = {w.url for w in self.registry.decode() if not course.fits(w.pool, group)}
        found = choose({*excluded, *too_small})
        if found is None and too_small and not excluded and course.last_error is None:
            return choose(())
        return found

    def _nobody(self, course: Course, refused: Mapping[str, Overloaded]) -> ServingError:
        if refused:
            return list(refused.values())[-1]
        if course.last_error is not None:
            return course.last_error
        return Unavailable("no worker can take the request now", retry_after_s=self.settings.retry_after_s)

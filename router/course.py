"""One prompt's course: what was asked (Job), what has come back so far, and how often it may still be tried.

Changed by the tries that serve it, read by the relay's consumer; all on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from time import perf_counter
from typing import Any

from router.legs import AnyLeg, LegFailed
from router.opening import Opening
from router.report import Report, Way
from router.workers.state import Worker
from shared.errors import BackendError, DeadlineExceeded, ServingError
from shared.pool_size import PoolSize
from shared.wire import DecodeRequest, Handoff, Logprobs, PrefillRequest, Sampling, TokenOut


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt to be answered.

    started: perf_counter() when the client's request was read. timeout_s: from then to the deadline.
    """

    request_id: str
    token_ids: list[int]
    num_choices: int
    sampling: Sampling
    timeout_s: float
    started: float


@dataclass(slots=True)
class Tries:
    """Failures on the way of one group of choices; a group that is split up hands its count on to each part."""

    failed: int = 0


class Course:
    """State of one job. Tokens go to `emit` in the order of their coming; `done` is told when all is in.

    wait_until: how long it may wait for a worker, once there was none; until its next token or failure.
    """

    def __init__(
        self, job: Job, *, max_tries: int, emit: Callable[[list[TokenOut]], None], done: Callable[[], None]
    ) -> None:
        self.job = job
        self.report = Report(prompt_tokens=len(job.token_ids))
        self.avoid: set[str] = set()
        self.failures = 0
        self.last_error: ServingError | None = None
        self.placed_at: float | None = None
        self.wait_until: float | None = None
        self.holders: dict[int, tuple[Worker, str]] = {}
        self.prompt_logprobs: list[Logprobs] = []
        self._max_tries = max_tries
        self._emit = emit
        self._done = done
        self._generated: list[list[int]] = [[] for _ in range(job.num_choices)]
        self._finished = [False] * job.num_choices
        self._num_legs = 0

    @property
    def begun(self) -> bool:
        """Has any token been given out?"""
        return any(self._generated)

    @property
    def left_s(self) -> float:
        """Seconds to the deadline. Raises DeadlineExceeded when there are none."""
        left = self.job.timeout_s - (perf_counter() - self.job.started)
        if left <= 0:
            raise DeadlineExceeded("the request's time is over")
        return left

    def unfinished(self, group: Iterable[int]) -> list[int]:
        """Choices of the group that still need tokens."""
        return [choice for choice in group if not self._finished[choice]]

    def max_new_tokens(self, group: range) -> int:
        """Tokens that each choice of the group may still get."""
        return self.job.sampling.max_tokens - len(self._generated[group.start])

    def fits(self, pool: PoolSize, group: range) -> bool:
        """Can the pool ever hold the group's answers at their longest?"""
        num_tokens = len(self.job.token_ids) + len(self._generated[group.start])
        return pool.holds(num_tokens, len(group), self.max_new_tokens(group))

    def outstanding_tokens(self, group: range) -> int:
        """Weight of the group's work in placement: its prompt once, its answers at their longest."""
        return len(self.job.token_ids) + len(group) * self.job.sampling.max_tokens

    def next_id(self) -> str:
        """A new internal request id: two legs of one job never share one, even at one worker."""
        self._num_legs += 1
        return self.job.request_id if self._num_legs == 1 else f"{self.job.request_id}.r{self._num_legs - 1}"

    def decode_request(self, group: range, request_id: str, *, local: bool) -> DecodeRequest:
        """What decode is told: prompt and what was already generated."""
        return DecodeRequest(mode="local" if local else "handoff", **self._work(group, request_id))

    def prefill_request(self, group: range, request_id: str, handoff: Handoff | None) -> PrefillRequest:
        """What prefill is told."""
        return PrefillRequest(handoff=handoff, **self._work(group, request_id))

    def _work(self, group: range, request_id: str) -> dict[str, Any]:
        """What both are told (shared.wire.Work)."""
        return {
            "request_id": request_id,
            "token_ids": self._token_ids(group),
            "num_prompt_tokens": len(self.job.token_ids),
            "num_choices": len(group),
            "first_choice": group.start,
            "sampling": self.job.sampling,
            "timeout_s": self.left_s,
        }

    def placed(self, way: Way) -> float:
        """A placement was chosen: that ends `route`, or `retry` after a failure. Returns the time."""
        now = perf_counter()
        self.report.way = way
        if self.placed_at is None or self.failures == 0:
            self.placed_at = now
        way.stages.route = self.placed_at - self.job.started
        way.stages.retry = now - self.placed_at
        return now

    def first(self, leg: AnyLeg, group: range, opening: Opening, way: Way) -> None:
        """The first tokens of a group are there: give them out, with all that is known by now.

        A resumed group's "first" is only its next token: the job's cached count stays that of the real one.
        """
        first, sampling = opening.first, self.job.sampling
        wanted = list(group) if sampling.max_tokens else []
        if sorted(token.choice for token in first.tokens) != wanted:
            raise LegFailed(leg, BackendError("a worker did not sample one first token for each choice"))
        if not self.begun:
            if sampling.num_prompt_logprobs is not None:
                if len(opening.prompt_logprobs) != len(self.job.token_ids) - 1:
                    raise LegFailed(leg, BackendError("a worker did not score the whole prompt"))
                self.prompt_logprobs = opening.prompt_logprobs
            self.report.cached_tokens = min(first.cached_tokens, len(self.job.token_ids))
        way.stages.queue = first.queue_s
        way.stages.prefill = first.prefill_s
        way.left(perf_counter())
        self.report.way = way
        self.tokens(leg, group, first.tokens)
        if not wanted:
            self._finished = [True] * self.job.num_choices

    def tokens(self, leg: AnyLeg, group: range, tokens: list[TokenOut]) -> None:
        """Take over the sampled tokens of one event, all or none: a try that follows resumes behind what is out."""
        fresh = self._checked(leg, group, tokens)
        for token in fresh:
            self._generated[token.choice].append(token.token_id)
            self._finished[token.choice] = token.finish_reason is not None
        if fresh:
            self.wait_until = None
            self.report.completion_tokens += len(fresh)
            self._emit(fresh)

    def _checked(self, leg: AnyLeg, group: range, tokens: list[TokenOut]) -> list[TokenOut]:
        """Without those of choices that have ended. Raises LegFailed at what no worker may send."""
        fresh: list[TokenOut] = []
        room: dict[int, int] = {}
        for token in tokens:
            choice = token.choice
            if choice not in group:
                raise LegFailed(leg, BackendError("a worker sent a token of a choice that it does not have"))
            if choice not in room:
                is_open = not self._finished[choice]
                room[choice] = self.job.sampling.max_tokens - len(self._generated[choice]) if is_open else 0
            if not room[choice]:
                continue
            if token.finish_reason is None and room[choice] == 1:
                raise LegFailed(leg, BackendError("a worker sent the last token without saying so"))
            room[choice] = room[choice] - 1 if token.finish_reason is None else 0
            fresh.append(token)
        return fresh

    def stop(self, choice: int) -> bool:
        """The consumer needs no more tokens of this choice. False if it had ended already."""
        was_open = not self._finished[choice]
        self._finished[choice] = True
        return was_open

    def ended(self, way: Way) -> None:
        """A group is served, and all that will be measured is; when it was the last one the consumer is told."""
        way.left(perf_counter())
        self.report.way = way
        if all(self._finished):
            self._done()

    def failed(self, error: ServingError, tries: Tries) -> None:
        """Count a failed try. Raises the error if it must not or cannot be tried again."""
        self.last_error = error
        self.wait_until = None
        self.failures += 1
        tries.failed += 1
        if not error.retryable or tries.failed >= self._max_tries:
            raise error
        self.report.retries += 1

    def refused(self, error: ServingError) -> None:
        """Count a try for which no worker had room, before it is made again. That is no worker's failure."""
        self.last_error = error
        self.wait_until = None
        self.failures += 1
        self.report.retries += 1

    def _token_ids(self, group: range) -> list[int]:
        return self.job.token_ids + self._generated[group.start]

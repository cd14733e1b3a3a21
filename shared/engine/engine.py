"""The engine: one thread that owns pool, scheduler and runner, and turns messages into events.

In: submit, received (KV has arrived), stop_choices, cancel, release. All of them return at once.
Out: each group's `deliver`, called on the engine thread.
Not its business: HTTP, text, the wire of the hand-off.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import structlog

from shared.engine.attention import StepAbandoned
from shared.engine.blocks import BlockPool, PoolCounts
from shared.engine.output import OutputStep
from shared.engine.runner import StepRunner, is_out_of_memory
from shared.engine.scheduler import Scheduler
from shared.engine.sequence import Failed, Group, State
from shared.engine.step import Limits, Step
from shared.errors import EngineFault, InvariantBroken, Overloaded, ServingError

log = structlog.get_logger()

_STOPPED = "the engine stopped"


@dataclass
class EngineCounts:
    """Counters since the start; written by the engine thread, read by metrics."""

    prompt_tokens_computed: int = 0
    prompt_tokens_cached: int = 0
    output_tokens: int = 0
    steps: int = 0
    faults: int = 0


class Engine:
    """See the module. `clock` is monotonic seconds; deadlines of groups are on it."""

    def __init__(
        self,
        pool: BlockPool,
        limits: Limits,
        runner: StepRunner,
        eos_token_ids: Sequence[int],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._scheduler = Scheduler(pool, limits)
        self._runner = runner
        self._output = OutputStep(self._scheduler, frozenset(eos_token_ids), clock)
        self._clock = clock
        self._inbox: deque[Callable[[], None]] = deque()
        self._wake = threading.Condition()
        self._groups: dict[int, Group] = {}
        self._stopping = False
        self._has_ended = False
        self._broken: str | None = None
        self._act_on_broken: Callable[[], None] | None = None
        self._step_started_at: float | None = None
        self._thread = threading.Thread(target=self._loop, name="engine", daemon=True)
        self.counts = EngineCounts()

    def start(self) -> None:
        self._thread.start()

    def close(self, timeout_s: float = 10.0) -> None:
        """Fail what is left and stop the thread."""
        with self._wake:
            self._stopping = True
            self._wake.notify()
        if self._thread.is_alive():
            self._thread.join(timeout_s)

    # -- messages, from any thread

    def submit(self, group: Group) -> None:
        """Queue a request. Refusals are delivered as Failed; `release` must follow in every case."""
        group.submitted_at = self._clock()
        with self._wake:
            if not self._has_ended:
                self._groups[id(group)] = group
                self._post(lambda: self._submit(group))
                return
        group.deliver(Failed(EngineFault(_STOPPED)))

    def received(self, group: Group, first_tokens: dict[int, int], *, is_exact: bool = True) -> None:
        """KV of the prompt is in the pool, exact or once quantised; go on from these first tokens (choice: id)."""
        at = self._clock()
        self._post(lambda: self._received(group, first_tokens, at, is_exact))

    def stop_choices(self, group: Group, choices: Sequence[int]) -> None:
        """These choices need no more tokens."""
        self._post(lambda: self._output.stop_choices(group, choices))

    def cancel(self, group: Group) -> None:
        """Stop computing for a request: after this step, between two layers if it is alone in it."""
        group.cancelled = True
        self._post(lambda: self._scheduler.end(group))

    def release(self, group: Group) -> None:
        """Cancel, and give back every block: nobody reads or writes them any more."""
        group.cancelled = True
        self._post(lambda: self._release(group))

    # -- state, from any thread

    def on_broken(self, act: Callable[[], None]) -> None:
        """`act` is called once, on the engine thread, when this engine can never serve again."""
        self._act_on_broken = act

    @property
    def pool_counts(self) -> PoolCounts:
        return self._scheduler.pool.counts()

    @property
    def num_groups(self) -> int:
        """Requests submitted and not yet released."""
        return len(self._groups)

    @property
    def num_waiting(self) -> int:
        return len(self._scheduler.waiting)

    @property
    def is_broken(self) -> bool:
        """A step failed, or the thread died of an exception: this engine will never serve again."""
        return self._broken is not None

    def problem(self, step_limit_s: float) -> str | None:
        """Why this engine cannot serve, or None. A step longer than `step_limit_s` counts as hung."""
        if self._broken is not None:
            return self._broken
        if not self._thread.is_alive():
            return "the engine thread is not running"
        started = self._step_started_at
        if started is not None and self._clock() - started > step_limit_s:
            return "the engine is stuck in a step"
        return None

    # -- the engine thread

    def _post(self, message: Callable[[], None]) -> None:
        with self._wake:
            self._inbox.append(message)
            self._wake.notify()

    def _loop(self) -> None:
        try:
            while self._wait_for_work():
                self._turn()
            self._read_inbox()
        except BaseException as exc:
            log.exception("engine_died")
            self._break("the engine thread died")
            if not isinstance(exc, Exception):
                raise
        finally:
            self._answer_all()

    def _wait_for_work(self) -> bool:
        """Block until there is a message, a step to run or a deadline. False: stop."""
        with self._wake:
            while not self._stopping and not self._inbox and self._scheduler.is_idle():
                deadline = self._scheduler.next_deadline()
                wait_s = None if deadline is None else max(0.0, deadline - self._clock())
                if not self._wake.wait(wait_s):
                    break
            return not self._stopping

    def _read_inbox(self) -> None:
        while self._inbox:
            self._inbox.popleft()()

    def _answer_all(self) -> None:
        """Nobody may be left waiting, whatever ended the thread; later requests are answered by `submit`."""
        with self._wake:
            self._has_ended = True
            left = list(self._groups.values())
        for group in left:
            try:
                self._scheduler.fail(group, EngineFault(_STOPPED))
            except InvariantBroken:
                group.deliver(Failed(EngineFault(_STOPPED)))

    def _turn(self) -> None:
        self._read_inbox()
        self._scheduler.expire(self._clock())
        self._scheduler.admit()
        step = self._scheduler.schedule()
        if not step:
            return
        self._step_started_at = self._clock()
        try:
            self._run(step, self._step_started_at)
        finally:
            self._step_started_at = None

    def _run(self, step: Step, now: float) -> None:
        for chunk in step.chunks:
            if chunk.group.prompt_started_at is None:
                chunk.group.prompt_started_at = now
                self.counts.prompt_tokens_cached += chunk.start
        for seq in step.decodes:
            if seq.group.decode_started_at is None:
                seq.group.decode_started_at = now
        self._attempt(step)

    def _attempt(self, step: Step) -> None:
        """Run a step and count it. Whatever happens, its groups are told."""
        try:
            logits_BV = self._runner.run(step)
        except StepAbandoned:
            for group in step.groups:
                self._scheduler.end(group)
            return
        except Exception as exc:  # noqa: BLE001 - whatever it is, somebody is told
            if is_out_of_memory(exc) and len(step.groups) > 1:
                self._run_one_by_one(step, exc)
            else:
                self._fault(step, exc)
            return
        try:
            num_tokens = self._output.apply(step, logits_BV)
        except Exception as exc:  # noqa: BLE001 - the same; half of the step may have been applied
            self._fault(step, exc)
            return
        self.counts.steps += 1
        self.counts.prompt_tokens_computed += sum(c.end - c.start for c in step.chunks)
        self.counts.output_tokens += num_tokens

    def _run_one_by_one(self, step: Step, cause: Exception) -> None:
        """Only who is too large alone fails: the others must not pay for one request's memory.

        But KV that a sender may be reading is not written again: alone it may round otherwise, and decode would
        get layers of two runs. Such a request fails, and may be tried again.

        The copies go with the first attempts until one has run; nothing was written in between, so a repeated
        copy changes nothing.
        """
        log.warning("step_split", num_groups=len(step.groups))
        copies = step.copies
        for part in step.by_group():
            if part.is_told:
                self._fault(part, cause)
                continue
            part.copies = copies
            num_faults = self.counts.faults
            self._attempt(part)
            if self.counts.faults == num_faults:
                copies = []

    def _break(self, problem: str) -> None:
        is_first, self._broken = self._broken is None, problem
        if is_first and self._act_on_broken is not None:
            self._act_on_broken()

    def _fault(self, step: Step, cause: Exception) -> None:
        """End a step's requests. Only for want of memory does the engine go on serving others."""
        log.error("step_failed", exc_info=cause, num_decodes=len(step.decodes), num_chunks=len(step.chunks))
        self.counts.faults += 1
        is_memory = is_out_of_memory(cause)
        error: ServingError = EngineFault("the engine failed while serving this request")
        if is_memory:
            error = Overloaded("the worker ran out of memory", retry_after_s=1.0)
        for group in step.groups:
            self._scheduler.fail(group, error)
        if not is_memory:
            self._break("a step of the engine failed")

    def _submit(self, group: Group) -> None:
        self._scheduler.admit()  # who has room by now is not in the queue that may be full
        try:
            self._scheduler.check(group)
        except ServingError as exc:
            self._scheduler.fail(group, exc)
        else:
            if not group.cancelled:
                self._scheduler.add(group)

    def _received(self, group: Group, first_tokens: dict[int, int], at: float, is_exact: bool) -> None:
        if group.state is State.ENDED:
            return
        group.ready_at = at
        group.is_exact = is_exact
        self._scheduler.received(group)
        going_on = first_tokens if group.work.max_new_tokens > 1 else {}
        self._scheduler.fork(group, {c: t for c, t in going_on.items() if c not in group.stopped})
        self._output.retire(group)

    def _release(self, group: Group) -> None:
        self._scheduler.release(group)
        self._groups.pop(id(group), None)

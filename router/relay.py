"""One prompt's way through the workers, from its token ids to the last token, whatever breaks on the way.

    async with dispatcher.relay(job) as relay:
        async for tokens in relay: ...        # batches of TokenOut, as soon as they are there
        relay.report                          # complete once the loop has ended

Leaving the block cancels what is left at both workers. A lost worker costs a pause: the next try resumes from
the tokens that are out, one leg per unfinished choice, and draws the same tokens, because sampling is keyed by
position. A prompt that finds no room for its first token waits for that of another one of its request.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import replace

import structlog

from router.course import Course, Job, Tries
from router.fleet import Fleet
from router.legs import LegFailed
from router.report import Report
from router.siblings import Siblings, Turn
from router.solo import SoloTry
from router.split import SplitTry
from shared.asgi.disconnect import finish
from shared.errors import BackendError, DeadlineExceeded, HandoffError, Overloaded, ServingError, Unavailable
from shared.wire import Logprobs, StopChoices, TokenOut

_log = structlog.get_logger(__name__)


class Relay:
    """Runs in a task of its own, so that a client's hang-up can never stop its cleaning up half way."""

    def __init__(self, fleet: Fleet, job: Job, turn: Turn) -> None:
        self._fleet = fleet
        self._turn = turn
        self._course = Course(job, max_tries=fleet.settings.max_tries, emit=self._take, done=self._finish)
        self._tokens: list[TokenOut] = []
        self._complete = False
        self._failure: BaseException | None = None
        self._news = asyncio.Event()
        self._errands: set[asyncio.Task[None]] = set()
        self.task = asyncio.create_task(self._run(), name=f"relay-{job.request_id}")

    @property
    def report(self) -> Report:
        """What is measured and counted so far."""
        return self._course.report

    @property
    def prompt_logprobs(self) -> list[Logprobs]:
        """Of positions 1, 2, ... of the prompt, if wanted; there before the first tokens are."""
        return self._course.prompt_logprobs

    def __aiter__(self) -> Relay:
        return self

    async def __anext__(self) -> list[TokenOut]:
        """All tokens since the last call, at least one. Raises what broke the relay, after its tokens."""
        while not (self._tokens or self._complete or self._failure):
            self._news.clear()
            await self._news.wait()
        if self._tokens:
            tokens, self._tokens = self._tokens, []
            return tokens
        if self._failure is not None:
            raise self._failure
        raise StopAsyncIteration

    def stop(self, choice: int) -> None:
        """A stop string ended this choice: drop its further tokens and tell its worker, without waiting."""
        if self._course.stop(choice) and choice in self._course.holders:
            errand = asyncio.create_task(self._tell_stop(choice))
            self._errands.add(errand)
            errand.add_done_callback(self._errands.discard)

    async def aclose(self) -> None:
        """Cancel what is left at the workers. A relay that is complete ends by itself, within a bounded time."""
        if not self._complete:
            await finish(_end(self.task))

    async def _run(self) -> None:
        try:
            async with asyncio.timeout(self._course.left_s):
                await self._serve_in_turn()
        except TimeoutError:
            self._fail(DeadlineExceeded("the request's time is over"))
        except HandoffError as exc:
            failure = BackendError("the hand-off between two workers failed")
            failure.__cause__ = exc
            self._fail(failure)
        except asyncio.CancelledError:
            self._fail(Unavailable("the router is shutting down", retry_after_s=1.0))
            raise
        except Exception as exc:  # noqa: BLE001 - raised again in the consumer
            self._fail(exc)
        else:
            self._finish()
        finally:
            for errand in tuple(self._errands):
                await finish(_end(errand))

    async def _serve_in_turn(self) -> None:
        """Serve all choices. Without room for the first tokens try again when a sibling has made some."""
        course = self._course
        while True:
            try:
                await self._serve(range(course.job.num_choices), Tries())
                return
            except Overloaded as exc:
                if course.begun or isinstance(exc, Unavailable):
                    raise
                await self._turn.again(exc)
                course.refused(exc)
                _log.debug("asked_again", request_id=course.job.request_id, error=exc.message)

    async def _serve(self, group: range, tries: Tries) -> None:
        """Try until every choice of the group has ended. Raises the error that ends the request."""
        course = self._course
        while True:
            try:
                await self._try(group, tries)
                return
            except LegFailed as exc:
                pending = course.unfinished(group)
                if not pending:
                    course.ended(course.report.way)
                    return
                _log.warning(
                    "try_failed",
                    request_id=course.job.request_id,
                    worker=exc.leg.worker.name,
                    code=exc.error.code,
                    error=exc.error.message,
                    begun=course.begun,
                )
                course.failed(exc.error, tries)
                course.avoid.add(exc.leg.worker.url)
            if course.begun and len(group) > 1:
                await self._serve_each(pending, tries)
                return

    async def _serve_each(self, choices: list[int], tries: Tries) -> None:
        """Go on with every unfinished choice by itself, since they have different tokens by now."""
        try:
            async with asyncio.TaskGroup() as tasks:
                for choice in choices:
                    tasks.create_task(self._serve(range(choice, choice + 1), replace(tries)))
        except ExceptionGroup as group:  # NOTE: what `except*` raises comes out as a group again
            raise _first_of(group) from group

    async def _try(self, group: range, tries: Tries) -> None:
        if self._fleet.registry.unified:
            await SoloTry(self._fleet, self._course, group).run_unified()
        elif self._course.max_new_tokens(group) <= 1:
            await SoloTry(self._fleet, self._course, group).run_prefill_only()
        else:
            await SplitTry(self._fleet, self._course, group, tries).run()

    async def _tell_stop(self, choice: int) -> None:
        worker, request_id = self._course.holders[choice]
        try:
            await self._fleet.client.stop(worker, StopChoices(request_id=request_id, choices=[choice]))
        except ServingError as exc:  # the worker goes on to its own end; its tokens are dropped here
            _log.debug("stop_not_told", worker=worker.name, code=exc.code)

    def _take(self, tokens: list[TokenOut]) -> None:
        self._tokens.extend(tokens)
        self._news.set()

    def _finish(self) -> None:
        self._complete = True
        self._news.set()

    def _fail(self, exc: BaseException) -> None:
        if self._complete:
            _log.debug("failed_after_the_end", error=str(exc))
            return
        self._failure = exc
        self._news.set()


class Dispatcher:
    """Starts relays, and knows those that are still at work."""

    def __init__(self, fleet: Fleet) -> None:
        self._fleet = fleet
        self._running: set[asyncio.Task[None]] = set()

    @property
    def num_running(self) -> int:
        """Relays that still hold anything at a worker, or wait for room there."""
        return len(self._running)

    @asynccontextmanager
    async def relay(self, job: Job, turn: Turn | None = None) -> AsyncIterator[Relay]:
        """A relay that lives no longer than the block, except to let an ended answer's connections settle.

        turn: among the prompts of its request, if there are several.
        """
        relay = Relay(self._fleet, job, turn or Siblings(1).turns[0])
        self._running.add(relay.task)
        relay.task.add_done_callback(self._running.discard)
        try:
            yield relay
        finally:
            await relay.aclose()

    async def idle(self) -> None:
        """Wait until nothing is held at any worker."""
        while self._running:
            await asyncio.wait(set(self._running))

    async def aclose(self) -> None:
        """Cancel every relay and wait until all are over."""
        for task in tuple(self._running):
            await finish(_end(task))


async def _end(task: asyncio.Task[None]) -> None:
    """Cancel a task and wait until it is over. To be shielded by `finish`."""
    task.cancel()
    await asyncio.wait({task})


def _first_of(group: ExceptionGroup[Exception]) -> Exception:
    """The first plain exception in a group of groups."""
    exc: Exception = group
    while isinstance(exc, ExceptionGroup):
        exc = exc.exceptions[0]
    return exc

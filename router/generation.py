"""All prompts of one client request: their relays side by side, their tokens turned into text, their counts.

Choice i * n + j is sample j of prompt i, whatever order the prompts end in.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing
from time import perf_counter

from router.course import Job
from router.openai.resolve import Plan
from router.openai.responses import Usage
from router.relay import Dispatcher, Relay
from router.report import Report, combined
from router.siblings import Siblings
from router.text.choice import ChoiceText, Piece
from router.text.tokenizer import TextTokenizer
from shared.errors import InvalidRequest
from shared.wire import TokenOut

Batch = list[tuple[int, Piece]]


class Generation:
    """Made and entered for one request; `aclose` cancels whatever still runs, at the workers too.

    started: perf_counter() when the request was read. in_client_words: for what workers complain about.
    """

    def __init__(
        self,
        dispatcher: Dispatcher,
        plan: Plan,
        tokenizer: TextTokenizer,
        *,
        request_id: str,
        timeout_s: float,
        started: float,
        in_client_words: Callable[[InvalidRequest], InvalidRequest],
    ) -> None:
        self._dispatcher = dispatcher
        self._in_client_words = in_client_words
        self._started = started
        self._num_choices = plan.num_choices
        self._num_shown = plan.num_shown
        self._echoes = plan.echoes
        self._texts: list[ChoiceText] = [
            plan.choice_text(tokenizer, i, offset=len(plan.echoes[i].text) if plan.echoes else 0)
            for i in range(len(plan.prompts))
            for _ in range(plan.num_choices)
        ]
        self._jobs = [
            Job(
                request_id=request_id if len(plan.prompts) == 1 else f"{request_id}.p{i}",
                token_ids=prompt.token_ids,
                num_choices=plan.num_choices,
                sampling=prompt.sampling,
                timeout_s=timeout_s,
                started=started,
            )
            for i, prompt in enumerate(plan.prompts)
        ]
        self._turns = Siblings(len(plan.prompts)).turns
        self._relays: dict[int, Relay] = {}
        self._ended: list[Report] = []
        self._first: Relay | None = None
        self._batches: asyncio.Queue[Batch | BaseException | None] = asyncio.Queue()
        self._tasks: list[asyncio.Task[None]] = []

    @property
    def num_choices(self) -> int:
        """Over all prompts."""
        return len(self._texts)

    def shown(self) -> list[int]:
        """The choices that the client gets, in order: of each prompt the best by their mean logprob."""
        chosen: list[int] = []
        for start in range(0, self.num_choices, self._num_choices):
            samples = list(range(start, start + self._num_choices))
            if self._num_shown < self._num_choices:
                samples.sort(key=lambda index: -self._texts[index].mean_logprob)
            chosen += samples[: self._num_shown]
        return chosen

    def usage(self) -> Usage:
        """Tokens so far: prompts once each, whatever n is."""
        return Usage(
            prompt_tokens=sum(len(job.token_ids) for job in self._jobs),
            completion_tokens=sum(text.completion_tokens for text in self._texts),
            cached_tokens=sum(relay.report.cached_tokens for relay in self._relays.values()),
        )

    @property
    def num_logprobs(self) -> int:
        """So far, those of the best tokens and of echoed prompts included: what makes an answer long."""
        total = 0
        for index, job in enumerate(self._jobs):
            sampling = job.sampling
            if sampling.num_logprobs is not None:
                texts = self._texts[index * self._num_choices : (index + 1) * self._num_choices]
                total += sum(text.completion_tokens for text in texts) * (sampling.num_logprobs + 1)
            if sampling.num_prompt_logprobs is not None:
                total += len(job.token_ids) * self._num_choices * (sampling.num_prompt_logprobs + 1)
        return total

    def report(self) -> Report:
        """What is measured so far; with several prompts the way is that of the one that ended last.

        Before any has ended it is that of the one whose tokens came first.
        """
        relays = sorted(self._relays.values(), key=lambda relay: relay is self._first)
        open_ones = [r.report for r in relays if all(r.report is not e for e in self._ended)]
        reports = [*open_ones, *self._ended] or [Report(prompt_tokens=0)]
        return combined(reports, total_s=perf_counter() - self._started)

    async def batches(self) -> AsyncGenerator[Batch, None]:
        """Pieces by choice, as they come; a batch may be empty. Raises what broke any of the prompts."""
        try:
            if len(self._jobs) == 1:
                async with aclosing(self._serve(0)) as batches:
                    async for batch in batches:
                        yield batch
                return
            self._tasks = [asyncio.create_task(self._guard(i)) for i in range(len(self._jobs))]
            num_open = len(self._jobs)
            while num_open:
                item = await self._batches.get()
                if item is None:
                    num_open -= 1
                elif isinstance(item, BaseException):
                    raise item
                else:
                    yield item
        except InvalidRequest as exc:
            raise self._in_client_words(exc) from exc

    async def aclose(self) -> None:
        """Stop everything and wait until it has stopped."""
        for task in self._tasks:
            task.cancel()
        if self._tasks:
            await asyncio.wait(self._tasks)

    async def _guard(self, index: int) -> None:
        try:
            async with aclosing(self._serve(index)) as batches:
                async for batch in batches:
                    self._batches.put_nowait(batch)
        except Exception as exc:  # noqa: BLE001 - raised again by batches()
            self._batches.put_nowait(exc)
        else:
            self._batches.put_nowait(None)

    async def _serve(self, index: int) -> AsyncGenerator[Batch, None]:
        offset = index * self._num_choices
        texts = self._texts[offset : offset + self._num_choices]
        turn = self._turns[index]
        async with self._dispatcher.relay(self._jobs[index], turn) as relay:
            self._relays[index] = relay
            is_echoed = not self._echoes
            async for tokens in relay:
                turn.begun()
                if self._first is None:
                    self._first = relay
                if not is_echoed:
                    for batch in self._echo(index, relay):
                        yield batch
                        await asyncio.sleep(0)  # it may be long, and others have their turn
                    is_echoed = True
                stopped_before = sum(text.stopped_early for text in texts)
                batch = self._push(offset, tokens)
                has_stopped = sum(text.stopped_early for text in texts) > stopped_before
                is_finished = all(text.finished for text in texts)
                if has_stopped and not is_finished:
                    for choice, text in enumerate(texts):
                        if text.stopped_early:
                            relay.stop(choice)
                yield batch
                if has_stopped and is_finished:
                    break  # a stop string was the end: leaving the relay cancels the rest at the workers
            self._ended.append(relay.report)
            if not self._jobs[index].sampling.max_tokens:
                endings = [(offset + choice, text.abandon("length")) for choice, text in enumerate(texts)]
                if not is_echoed:
                    for batch in self._echo(index, relay):
                        yield batch
                        await asyncio.sleep(0)
                yield endings
        turn.ended()

    def _echo(self, index: int, relay: Relay) -> Iterator[Batch]:
        """The prompt, before every choice of it: each piece for all of them, which share it."""
        is_scored = self._jobs[index].sampling.num_prompt_logprobs is not None
        pieces = self._echoes[index].pieces(relay.prompt_logprobs if is_scored else None)
        offset = index * self._num_choices
        for piece in pieces:
            yield [(offset + choice, piece) for choice in range(self._num_choices)]

    def _push(self, offset: int, tokens: list[TokenOut]) -> Batch:
        batch: Batch = []
        for token in tokens:
            if piece := self._texts[offset + token.choice].push(token):
                batch.append((offset + token.choice, piece))
        return batch

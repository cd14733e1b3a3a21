"""One generation as an HTTP answer: in one piece, or as server-sent events.

A stream's status and headers wait for the first token, so a failure before it is a real status; afterwards a
failure is one `error` event and the end, without [DONE].
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping
from functools import partial
from time import perf_counter

from starlette.responses import Response

from router.generation import Batch, Generation
from router.metrics import RouterMetrics
from router.offload import Offload
from router.openai.response_answer import ResponseAnswer
from router.openai.responses import ChatAnswer, CompletionAnswer
from router.report import as_dict, headers
from router.text.choice import Piece
from shared.asgi.stream import StreamHead
from shared.asgi.text import header_value
from shared.errors import ServingError

Answer = ChatAnswer | CompletionAnswer | ResponseAnswer
BYTES_PER_LOGPROB = 16  # about, in JSON
TURN_BYTES = 65_536


class Answering:
    """Owner of one generation (shared.asgi.stream.StreamOwner). `release` gives the admission back."""

    def __init__(
        self,
        generation: Generation,
        answer: Answer,
        *,
        endpoint: str,
        stream: bool,
        continuous_usage: bool,
        started: float,
        metrics: RouterMetrics,
        offload: Offload,
        release: Callable[[], None],
    ) -> None:
        self._generation = generation
        self._answer = answer
        self._endpoint = endpoint
        self._stream = stream
        self._continuous_usage = continuous_usage
        self._started = started
        self._metrics = metrics
        self._offload = offload
        self._release = release
        self._batches = generation.batches()
        self._first_batch: Batch | None = None
        self._first_token_s: float | None = None
        self._ending = "client_gone"

    async def whole(self) -> Response:
        """The answer in one piece, with every stage in its headers. Raises ServingError."""
        pieces: list[list[Piece]] = [[] for _ in range(self._generation.num_choices)]
        try:
            async for batch in self._batches:
                self._note_first_token()
                for index, piece in batch:
                    pieces[index].append(piece)
        except Exception as exc:
            self._ending = _ending_of(exc)
            raise
        shown = [pieces[index] for index in self._generation.shown()]
        body = await self._encoded(partial(self._answer.whole, shown, self._generation.usage()))
        report = self._generation.report()
        self._ending = "ok"
        return Response(
            body, headers=_safe(headers(report, at_first_token=False)), media_type="application/json"
        )

    async def start(self) -> StreamHead:
        """Wait for the first token. Raises ServingError, which is a real status then."""
        try:
            self._first_batch = await anext(self._batches)
        except Exception as exc:
            self._ending = _ending_of(exc)
            raise
        self._note_first_token()
        return StreamHead(headers=headers(self._generation.report(), at_first_token=True))

    async def chunks(self) -> AsyncIterator[bytes]:
        """Opening events, pieces as they come, and what closes the stream."""
        usage = self._generation.usage() if self._continuous_usage else None
        opening = b"".join(self._answer.start(i, usage) for i in range(self._generation.num_choices))
        try:
            yield opening + self._events(self._first_batch or [])
            unbroken = 0
            async for batch in self._batches:
                if events := self._events(batch):
                    yield events
                    unbroken += len(events)
                if unbroken >= TURN_BYTES:  # NOTE: a client that keeps up never makes us wait
                    await asyncio.sleep(0)
                    unbroken = 0
        except Exception as exc:
            self._ending = _ending_of(exc)
            raise
        told = as_dict(self._generation.report())
        closing = await self._encoded(partial(self._answer.closing, self._generation.usage(), told))
        self._ending = "ok"
        yield closing

    async def aclose(self) -> None:
        """Cancel what still runs and write the request's line."""
        try:
            await self._batches.aclose()
            await self._generation.aclose()
        finally:
            self._release()
            self._metrics.ended(
                self._endpoint,
                self._ending,
                stream=self._stream,
                num_choices=self._generation.num_choices,
                first_token_s=self._first_token_s,
                usage=self._generation.usage(),
                report=self._generation.report(),
            )

    async def _encoded(self, work: Callable[[], bytes]) -> bytes:
        """What repeats all logprobs of the answer, which may be many."""
        return await self._offload.encoded(self._generation.num_logprobs * BYTES_PER_LOGPROB, work)

    def _events(self, batch: Batch) -> bytes:
        usage = self._generation.usage() if self._continuous_usage else None
        return b"".join(self._answer.piece(index, piece, usage) for index, piece in batch)

    def _note_first_token(self) -> None:
        if self._first_token_s is None:
            self._first_token_s = perf_counter() - self._started


def _safe(found: Mapping[str, str]) -> dict[str, str]:
    return {name: header_value(value) for name, value in found.items()}


def _ending_of(exc: Exception) -> str:
    return exc.code if isinstance(exc, ServingError) else "error"

"""From the engine thread to the event loop: one request's events as something to await."""

from __future__ import annotations

import asyncio
import contextlib
import time
from typing import TypeAlias

from shared.engine.engine import Engine
from shared.engine.grammar import GrammarState
from shared.engine.sequence import Admitted, Event, Failed, Group, Mode, PromptProgress, PromptScores
from shared.errors import InvariantBroken
from shared.wire import Finish, First, TokenOut, Work

EngineEvent: TypeAlias = Admitted | PromptScores | First | list[TokenOut] | Finish


class EngineRequest:
    """Submits a group and receives its events, in order, on the loop that made it.

    `close` must be called in every case, after whoever reads or writes the group's blocks has stopped.
    """

    def __init__(
        self,
        engine: Engine,
        work: Work,
        mode: Mode,
        progress: PromptProgress | None = None,
        grammar: GrammarState | None = None,
    ) -> None:
        self._engine = engine
        self._events: asyncio.Queue[Event] = asyncio.Queue()
        self._loop = asyncio.get_running_loop()
        self.group = Group(
            work=work,
            mode=mode,
            deadline=time.monotonic() + work.timeout_s,
            deliver=self._deliver,
            progress=progress,
            grammar=grammar,
        )
        engine.submit(self.group)

    async def next(self) -> EngineEvent:
        """The next event. Raises the ServingError that ended the request."""
        event = await self._events.get()
        if isinstance(event, Failed):
            raise event.error
        return event

    async def admitted(self) -> Admitted:
        """Wait for blocks. Must be the first event taken."""
        event = await self.next()
        if not isinstance(event, Admitted):
            raise InvariantBroken("a request made progress before it was admitted")
        return event

    def close(self) -> None:
        """Stop computing and free every block. Idempotent."""
        self._engine.release(self.group)

    def _deliver(self, event: Event) -> None:
        # After the loop is closed, which may be at any moment, nobody is left to tell: the process is going down.
        with contextlib.suppress(RuntimeError):
            self._loop.call_soon_threadsafe(self._events.put_nowait, event)

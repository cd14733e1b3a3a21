"""The prompts of one request, and whose turn it is when the workers have no room for all of them.

    asking ──first tokens──> running ──> ended
      │  ↑                                 ╎
   refused └╌╌╌╌╌ lets one ask again ╌╌╌╌╌╌┘
      ↓  │
    waiting

All ask at first. Then each that ends lets one that waits ask again, and one more while none asks, since others may
have left room as well: for each that was answered at most two are asked for again, however long the list is.
"""

from __future__ import annotations

import asyncio
from enum import Enum

from shared.errors import Overloaded


class _Phase(Enum):
    ASKING = "asking"
    WAITING = "waiting"
    RUNNING = "running"
    ENDED = "ended"


class Turn:
    """One prompt's place among its siblings. Changed on the event loop only."""

    def __init__(self, siblings: Siblings) -> None:
        self._siblings = siblings
        self._may_ask = asyncio.Event()
        self.ask()

    def ask(self) -> None:
        """It may be given to the workers."""
        self.phase = _Phase.ASKING
        self._num_ended_before = self._siblings.num_ended
        self._may_ask.set()

    async def again(self, refusal: Overloaded) -> None:
        """No worker has room for it: returns when it may be given to them again.

        That is when a sibling has ended. Raises the refusal if none has since it asked, nor is any at a worker.
        """
        self.phase = _Phase.WAITING
        if self._siblings.any_at_workers:
            self._may_ask.clear()
            await self._may_ask.wait()
        elif self._siblings.num_ended > self._num_ended_before:
            self.ask()
        else:
            raise refusal

    def begun(self) -> None:
        """It has room: its first tokens are there."""
        self.phase = _Phase.RUNNING

    def ended(self) -> None:
        """It was answered, and needs its room no more."""
        self.phase = _Phase.ENDED
        self._siblings.make_room()


class Siblings:
    """All prompts of a request, in their order."""

    def __init__(self, num_prompts: int) -> None:
        self.num_ended = 0
        self.turns = [Turn(self) for _ in range(num_prompts)]

    @property
    def any_at_workers(self) -> bool:
        """Does any have room, or may it still get some?"""
        return any(turn.phase in (_Phase.ASKING, _Phase.RUNNING) for turn in self.turns)

    def make_room(self) -> None:
        """One has ended: the first of those that wait ask again."""
        self.num_ended += 1
        num_free = 1 if any(turn.phase is _Phase.ASKING for turn in self.turns) else 2
        for turn in [turn for turn in self.turns if turn.phase is _Phase.WAITING][:num_free]:
            turn.ask()

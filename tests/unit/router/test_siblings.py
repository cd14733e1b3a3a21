"""Whose turn it is among the prompts of one request, without any worker."""

from __future__ import annotations

import asyncio

import pytest

from router.siblings import Siblings, Turn
from shared.errors import Overloaded

FULL = Overloaded("no room")


async def refused(*turns: Turn) -> list[asyncio.Task[None]]:
    """All of them have found no room; tasks that end when they may ask again."""
    tasks = [asyncio.create_task(turn.again(FULL)) for turn in turns]
    await asyncio.sleep(0)
    return tasks


async def asking(tasks: list[asyncio.Task[None]]) -> list[bool]:
    """Which of them ask again by now."""
    for _ in range(3):
        await asyncio.sleep(0)
    return [task.done() and task.exception() is None for task in tasks]


async def test_one_that_is_alone_is_refused() -> None:
    """Nobody makes room for it but other requests."""
    [turn] = Siblings(1).turns
    with pytest.raises(Overloaded, match="no room"):
        await turn.again(FULL)


async def test_the_last_that_asks_is_refused_if_none_has_room() -> None:
    """Until then those that were refused wait, since it may still get some."""
    first, second, third = Siblings(3).turns
    tasks = await refused(third, first)
    assert [False, False] == await asking(tasks)
    with pytest.raises(Overloaded):
        await second.again(FULL)
    for task in tasks:
        task.cancel()


async def test_each_that_ends_lets_one_ask_and_one_more_while_none_does() -> None:
    """In the order of the prompts; the one more finds out whether others have left room."""
    one, two, *others = Siblings(7).turns
    one.begun()
    two.begun()
    tasks = await refused(*others)
    one.ended()
    assert [True, True, False, False, False] == await asking(tasks)
    others[0].begun()
    two.ended()
    assert [True, True, True, False, False] == await asking(tasks)
    others[0].ended()
    assert [True] * 4 + [False] == await asking(tasks)
    tasks[-1].cancel()


async def test_one_asks_again_at_once_if_the_last_other_has_ended_meanwhile() -> None:
    """Others took that room, but it was there; without any since then it is refused."""
    first, second = Siblings(2).turns
    first.begun()
    first.ended()
    await second.again(FULL)
    with pytest.raises(Overloaded):
        await second.again(FULL)

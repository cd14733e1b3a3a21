"""A decode request: how long its reservation waits for KV."""

from __future__ import annotations

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.decode.stream import DecodeStream
from shared.errors import ReservationGone
from shared.wire import DecodeRequest, Sampling


class Engine:
    """A request's events: one, when it is let go."""

    def __init__(self) -> None:
        self.go = asyncio.Event()

    async def next(self) -> list[object]:
        """As shared.worker.stream.EngineRequest."""
        await self.go.wait()
        return []


def waiting(timeout_s: float) -> tuple[DecodeStream, Any]:
    """A stream that has granted a reservation, and the reservation."""
    work = DecodeRequest(
        request_id="r",
        token_ids=[1],
        num_prompt_tokens=1,
        sampling=Sampling(max_tokens=1),
        timeout_s=60,
        mode="handoff",
    )
    context = SimpleNamespace(reservation_timeout_s=timeout_s)
    stream = DecodeStream(cast(Any, context), work, cast(Any, None))
    reservation = SimpleNamespace(received=None, is_waiting=True)
    stream._reservation = cast(Any, reservation)
    return stream, reservation


async def test_kv_that_does_not_come_ends_it() -> None:
    """In the reservation's time."""
    stream, _ = waiting(0.05)
    with pytest.raises(ReservationGone):
        await stream._next(cast(Any, Engine()))


async def test_kv_that_is_there_is_waited_for_no_more() -> None:
    """The engine's step may be long: the request was ended with the KV in its blocks."""
    stream, reservation = waiting(0.05)
    engine = Engine()
    first = asyncio.ensure_future(stream._next(cast(Any, engine)))
    reservation.received = object()
    await asyncio.sleep(0.3)
    engine.go.set()
    assert [] == await first


async def test_kv_on_its_way_is_waited_for() -> None:
    """A long prompt's KV comes as it is computed, and the request was ended in the middle of that."""
    stream, reservation = waiting(0.05)
    reservation.is_waiting = False
    first = asyncio.ensure_future(stream._next(cast(Any, Engine())))
    await asyncio.sleep(0.3)
    assert not first.done()
    reservation.is_waiting = True
    with pytest.raises(ReservationGone):
        await first

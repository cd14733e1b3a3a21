"""A reservation's states: when the engine is told, and what can be claimed again."""

from __future__ import annotations

from typing import Any, cast

import pytest

from services.decode.reservations import Reservation
from shared.errors import HandoffError, ManifestMismatch, ReservationGone
from shared.kv.book import Received
from shared.kv.progress import FirstTokens
from tests.unit.shared.kv.blobs import expected

RECEIVED = Received(FirstTokens((5, 7), (False, True)), kv_bytes=4, wire_bytes=8)


class Engine:
    """Notes what it is told."""

    def __init__(self) -> None:
        self.told: list[tuple[dict[int, int], bool]] = []

    def received(self, group: object, first_tokens: dict[int, int], *, is_exact: bool) -> None:
        """KV is there."""
        self.told.append((first_tokens, is_exact))


class Group:
    """Two choices."""

    choices = (0, 1)


def _reservation(engine: Engine | None) -> Reservation:
    return Reservation(
        expected(num_choices=2), cast(Any, None), cast(Any, Group()), cast(Any, engine), vocab_size=100
    )


async def test_the_engine_goes_on_once_the_attempt_is_over() -> None:
    """Not before: between the two prefill is answered, on the core that the engine will compute on."""
    engine = Engine()
    reservation = _reservation(engine)
    claim = reservation.claim()
    claim.commit(RECEIVED)
    assert [] == engine.told
    with pytest.raises(ReservationGone, match="committed"):
        reservation.claim()
    claim.release()
    assert [({0: 5}, True)] == engine.told


async def test_an_attempt_that_failed_tells_nobody() -> None:
    """And leaves the reservation to another one."""
    engine = Engine()
    reservation = _reservation(engine)
    claim = reservation.claim()
    with pytest.raises(HandoffError, match="under way"):
        reservation.claim()
    with pytest.raises(ManifestMismatch, match="vocabulary"):
        claim.commit(Received(FirstTokens((5, 100), (False, False)), kv_bytes=4, wire_bytes=8))
    claim.release()
    reservation.claim().release()
    assert [] == engine.told


async def test_a_probe_can_be_filled_again_as_soon_as_it_was_filled() -> None:
    """By whoever has its answer, which comes before the attempt is over."""
    reservation = _reservation(None)
    first = reservation.claim()
    first.commit(RECEIVED)
    second = reservation.claim()
    first.release()
    with pytest.raises(HandoffError, match="under way"):
        reservation.claim()
    second.commit(RECEIVED)
    second.release()

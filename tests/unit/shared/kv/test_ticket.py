"""Tickets: only the issuer's own, unaltered and in time."""

from __future__ import annotations

import dataclasses

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.errors import ReservationGone, Unauthorized
from shared.kv.ticket import MAX_TICKET_CHARS, Ticket, kv_url, ticket_of
from shared.wire import Handoff

SECRET = b"a shared secret"
TICKET = Ticket("h1", 3, kv_url("127.0.0.1", 9000, "h1"), "boot1", 100.0)
TEXT = TICKET.sign(SECRET)


def test_round_trip() -> None:
    """A verified ticket says what was signed, in URL-safe text."""
    assert TICKET == Ticket.verify(TEXT, SECRET)
    assert TEXT.replace("-", "").replace("_", "").replace(".", "").isalnum()


@given(st.integers(0, len(TEXT) - 1), st.characters(codec="ascii"))
def test_altered_ticket_grants_nothing_else(at: int, character: str) -> None:
    """A ticket with any one character changed is refused, or still says the very same."""
    altered = TEXT[:at] + character + TEXT[at + 1 :]
    try:
        assert TICKET == Ticket.verify(altered, SECRET)
    except Unauthorized:
        assert altered != TEXT


@pytest.mark.parametrize(
    "text", ["", ".", "a.b", TEXT + "A", TEXT[:-1], TEXT.split(".")[0], "é" + TEXT, "A" * 10_000, TEXT + "\n"]
)
def test_malformed_ticket(text: str) -> None:
    """Text that is no ticket is refused, whatever its length."""
    with pytest.raises(Unauthorized):
        Ticket.verify(text, SECRET)


def test_other_secret() -> None:
    """A ticket of another system is refused."""
    with pytest.raises(Unauthorized):
        Ticket.verify(TEXT, b"another secret")


def test_empty_secret_is_no_secret() -> None:
    """Nothing is signed without a secret."""
    with pytest.raises(ValueError, match="empty"):
        TICKET.sign(b"")


def test_issuer_checks_boot_and_expiry() -> None:
    """Expired, or from before a restart: the reservation is gone."""
    TICKET.check_issuer(boot="boot1", now=99.9)
    with pytest.raises(ReservationGone, match="expired"):
        TICKET.check_issuer(boot="boot1", now=100.0)
    with pytest.raises(ReservationGone, match="restart"):
        TICKET.check_issuer(boot="boot2", now=0.0)


@pytest.mark.parametrize(
    "change", [{"kv_url": "http://10.0.0.1:1/v1/kv/h1"}, {"handoff_id": "h2"}, {"epoch": 4}, {"ticket": "x"}]
)
def test_sender_trusts_only_the_signed_url(change: dict[str, object]) -> None:
    """A grant whose URL, id or epoch is not the ticket's is refused before anything is sent."""
    good = Handoff(handoff_id="h1", epoch=3, kv_url=TICKET.kv_url, ticket=TEXT, have_tokens=0)
    assert TICKET == ticket_of(good, SECRET)
    with pytest.raises(Unauthorized):
        ticket_of(good.model_copy(update=change), SECRET)


def test_unusable_fields_are_not_signed() -> None:
    """An id that no path can carry, or a ticket too long for a header, is the issuer's mistake."""
    with pytest.raises(ValueError, match="handoff_id"):
        dataclasses.replace(TICKET, handoff_id="a/b").sign(SECRET)
    with pytest.raises(ValueError, match=str(MAX_TICKET_CHARS)):
        dataclasses.replace(TICKET, kv_url="http://" + "x" * MAX_TICKET_CHARS).sign(SECRET)


def test_ipv6_url() -> None:
    """An IPv6 address is bracketed in the URL."""
    assert kv_url("::1", 9000, "h1") == "http://[::1]:9000/v1/kv/h1"

"""What the two sides of the NIXL transport say to each other."""

from __future__ import annotations

import hmac

import pytest

from shared.errors import InvalidRequest, TransportFailed
from shared.kv.transports.nixl_wire import (
    Introduction,
    Terms,
    pack_notice,
    unpack_notice,
)

TOKEN = bytes(range(8))
SECRET = b"a shared secret"


def test_terms_are_read_as_they_were_written() -> None:
    """Block size, length of the introduction, and token."""
    terms = Terms(16, 455, TOKEN)
    assert "16/455/0001020304050607" == str(terms)
    assert terms == Terms.parse(str(terms))


@pytest.mark.parametrize(
    "text",
    [
        "",
        "16",
        "16/455",
        "0/0/0001020304050607",
        "16/-1/0001020304050607",
        "16/01/0001020304050607",
        "16/455/00010203040506",
        "16/455/0001020304050607 ",
        "16/1048577/0001020304050607",
        "1048577/0/0001020304050607",
        "99999999/0/0001020304050607",
        "16/455/0001020304050607/0",
    ],
)
def test_other_terms_are_refused(text: str) -> None:
    """Also sizes that would make the receiver wait for, or hold, more than it should."""
    with pytest.raises(InvalidRequest):
        Terms.parse(text)


def test_introduction_is_read_as_it_was_written() -> None:
    """The library's bytes and 64-bit addresses."""
    introduction = Introduction(b"metadata", (1, 2**63, 2**64 - 1))
    assert introduction == Introduction.unpack(introduction.pack(SECRET), SECRET)


@pytest.mark.parametrize("length", range(8 + 8 + 3 * 8 + 32))
def test_short_introduction_is_refused(length: int) -> None:
    """At every length; the KV may go another way."""
    with pytest.raises(TransportFailed):
        Introduction.unpack(Introduction(b"metadata", (1, 2, 3)).pack(SECRET)[:length], SECRET)


def test_damaged_introduction_is_refused() -> None:
    """Every bit of it."""
    whole = Introduction(b"metadata", (1, 2, 3)).pack(SECRET)
    for bit in range(8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(TransportFailed):
            Introduction.unpack(damaged, SECRET)


@pytest.mark.parametrize("content", [b"", bytes(7), b"\1" + bytes(7), bytes(4) + b"\1" + bytes(3), bytes(9)])
def test_signed_nonsense_is_refused(content: bytes) -> None:
    """What a worker of another version may say."""
    mac = hmac.digest(SECRET, b"handoff nixl introduction 1\0" + content, "sha256")
    with pytest.raises(InvalidRequest):
        Introduction.unpack(content + mac, SECRET)


def test_notices_are_read_as_they_were_written() -> None:
    """And what is no notice of ours is None."""
    assert (TOKEN, 2**40) == unpack_notice(pack_notice(TOKEN, 2**40))
    assert unpack_notice(b"something else") is None

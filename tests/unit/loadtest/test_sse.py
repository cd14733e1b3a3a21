"""The SSE parser gives the same events however the bytes are cut."""

from __future__ import annotations

from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from loadtest.sse import Comment, Event, SSEParser

STREAM = (
    'data: {"a": "é😀"}\n\n: keep-alive\r\ndata: one\rdata:two\r\n\r\nevent: error\ndata: bad\n\n'
).encode()
ITEMS = [Event('{"a": "é😀"}'), Comment("keep-alive"), Event("one\ntwo"), Event("bad", "error")]


def parse(*pieces: bytes) -> list[Event | Comment]:
    """Everything that these reads give."""
    parser = SSEParser()
    return [item for piece in pieces for item in parser.feed(piece)]


@given(st.lists(st.integers(0, len(STREAM)), max_size=20))
def test_any_split_gives_the_same_items(cuts: list[int]) -> None:
    """Where the network cuts a stream, even inside a character or a CRLF, changes nothing."""
    edges = [0, *sorted(cuts), len(STREAM)]
    assert parse(*(STREAM[a:b] for a, b in pairwise(edges))) == ITEMS


def test_byte_by_byte() -> None:
    """One byte at a time is the worst split."""
    assert parse(*(bytes([byte]) for byte in STREAM)) == ITEMS


@pytest.mark.parametrize("tail", [b"data: half", b"data: half\n", b"d"])
def test_an_unfinished_event_is_never_given_out(tail: bytes) -> None:
    """Without its blank line an event is not one, and the parser says that something is left."""
    parser = SSEParser()
    assert list(parser.feed(b"data: whole\n\n" + tail)) == [Event("whole")]
    assert parser.pending


def test_an_event_is_given_out_at_its_last_byte() -> None:
    """No token waits for the next one, whatever the line end is."""
    for end in (b"\n\n", b"\r\n\r\n", b"\r\r"):
        parser = SSEParser()
        *most, last = (bytes([byte]) for byte in b"data: x" + end)
        early = [item for piece in most for item in parser.feed(piece)]
        late = [] if early else list(parser.feed(last))
        assert [Event("x")] == early + late
        assert not parser.pending


def test_a_byte_order_mark_and_empty_events_are_skipped() -> None:
    """A BOM is no part of the first field; blank lines without data are no events."""
    assert parse(b"\xef\xbb\xbfdata: x\n\n\n\nevent: only-a-name\n\n") == [Event("x")]


def test_a_line_that_is_not_utf8_raises() -> None:
    """Damaged bytes are an error, not a replacement character."""
    with pytest.raises(UnicodeDecodeError):
        parse(b"data: \xff\n\n")

"""Server-sent events, byte by byte: what a server wrote, however the network cut it.

In: raw bytes. Out: events and comments, in order. An event that has no blank line after it is never given
out, as the HTML standard says, so half an event cannot be taken for a whole one.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

_BOM = b"\xef\xbb\xbf"


@dataclass(frozen=True, slots=True)
class Event:
    """One event. name is empty unless an `event:` line gave it; data lines are joined by newlines."""

    data: str
    name: str = ""


@dataclass(frozen=True, slots=True)
class Comment:
    """One line that starts with a colon, without the colon and the space after it."""

    text: str


class SSEParser:
    """Feed bytes, take events. Lines end in LF, CRLF or CR and may be cut anywhere, in a character too."""

    def __init__(self) -> None:
        self._buffer = bytearray()
        self._data: list[str] = []
        self._name = ""
        self._after_cr = False
        self._at_start = True

    @property
    def pending(self) -> bool:
        """Whether bytes were read that belong to no event yet: at the end of a stream, a cut."""
        return bool(self._buffer) or bool(self._data)

    def feed(self, data: bytes) -> Iterator[Event | Comment]:
        """Everything that these bytes complete. Raises UnicodeDecodeError on a line that is not UTF-8."""
        self._buffer += data
        while (line := self._take_line()) is not None:
            item = self._line(line.decode())
            if item is not None:
                yield item

    def _take_line(self) -> bytes | None:
        if self._after_cr and self._buffer:
            if self._buffer[0] == 0x0A:
                del self._buffer[0]
            self._after_cr = False
        ends = [end for end in (self._buffer.find(b"\n"), self._buffer.find(b"\r")) if end >= 0]
        if not ends:
            return None
        end = min(ends)
        # NOTE: a CR ends the line at once. Waiting for its LF would hold a token back until the next one.
        self._after_cr = self._buffer[end] == 0x0D
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        if self._at_start:
            self._at_start = False
            line = line.removeprefix(_BOM)
        return line

    def _line(self, line: str) -> Event | Comment | None:
        if not line:
            return self._dispatch()
        field, _, value = line.partition(":")
        value = value.removeprefix(" ")
        if not field:
            return Comment(value)
        if field == "data":
            self._data.append(value)
        elif field == "event":
            self._name = value
        return None

    def _dispatch(self) -> Event | None:
        data, name = self._data, self._name
        self._data, self._name = [], ""
        return Event("\n".join(data), name) if data else None

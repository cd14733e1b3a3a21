"""Making text from outside safe to put into a header, a log line or an error message."""

from __future__ import annotations

import re

import orjson

MAX_ID_CHARS = 128
_NOT_VISIBLE = re.compile(r"[^\x21-\x7e]+")
_NOT_HEADER = re.compile(r"[^\x20-\x7e]+")
_LINE_ENDS = tuple((chr(c).encode(), b"\\u%04x" % c) for c in (0x85, 0x2028, 0x2029))
_INTERNAL_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")


def visible_ascii(text: str, *, limit: int = MAX_ID_CHARS) -> str:
    """`text` without spaces, control characters and non-ASCII, at most `limit` characters; may be empty."""
    return _NOT_VISIBLE.sub("", text[: limit * 4])[:limit]


def header_value(text: str, *, limit: int = 1024) -> str:
    """`text` as one legal header value: only printable ASCII is kept, so nothing can split it."""
    return _NOT_HEADER.sub("", text)[:limit].strip()


def printable(text: str) -> str:
    """`text` with line ends, terminal escapes and all else that is not printed shown as escapes, not obeyed."""
    return text if text.isprintable() else "".join(c if c.isprintable() else ascii(c)[1:-1] for c in text)


def clipped(text: str, limit: int) -> str:
    """`text` that is valid UTF-8 and at most `limit` characters, with an ellipsis where it was cut."""
    if len(text) > limit:
        text = text[: limit - 1] + "…"
    return text.encode("utf-8", "replace").decode("utf-8")


def one_line_json(content: object) -> bytes:
    """JSON for one line of a stream, also for readers that take U+0085, U+2028 and U+2029 for line ends."""
    line = orjson.dumps(content)
    for raw, escaped in _LINE_ENDS:
        if raw in line:
            line = line.replace(raw, escaped)
    return line


def is_internal_id(text: str) -> bool:
    """Whether `text` may be a request id between our own processes (the pattern of shared.wire.Work)."""
    return _INTERNAL_ID.fullmatch(text) is not None

"""Tool calls out of an answer's text, as it comes: content, and the calls' names and arguments.

In: text in pieces, no matter how it is cut. Out: what each piece settles. Text is held back only while it can
be the beginning of a call; what turns out to be none is content after all. Arguments are passed on as they come.
What is between the marks is given out as one call or as text, never as both.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from router.text.tools_grammar import CLOSE, OPEN

_MAX_HEAD = 512  # characters between the mark and the arguments


@dataclass(frozen=True, slots=True)
class CallDelta:
    """A piece of call number `index`. id and name: in its first piece, whose arguments are empty."""

    index: int
    arguments: str = ""
    id: str | None = None
    name: str | None = None


@dataclass(slots=True)
class Parsed:
    """What became settled, in order: content comes before calls."""

    content: str = ""
    calls: list[CallDelta] = field(default_factory=list)


def _prefixes(parts: list[str]) -> re.Pattern[str]:
    """Matches every beginning of the sequence of `parts`, each of which is matched whole or not at all."""
    pattern = ""
    for part in reversed(parts):
        pattern = f"(?:{part}{pattern})?"
    return re.compile(pattern)


def _letters(text: str) -> list[str]:
    return [re.escape(character) for character in text]


_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([A-Za-z0-9_-]+)"\s*,\s*"arguments"\s*:\s*(?=\{)')
_COLON = (r"\s*", ":", r"\s*")
_NAME = ('"', "[A-Za-z0-9_-]*", '"', r"\s*", ",", r"\s*")
_HEAD_SO_FAR = _prefixes(
    [r"\s*", r"\{", r"\s*", *_letters('"name"'), *_COLON, *_NAME, *_letters('"arguments"'), *_COLON]
)
_TAIL = re.compile(rf"\s*\}}\s*{CLOSE}")
_TAIL_SO_FAR = _prefixes([r"\s*", r"\}", r"\s*", *_letters(CLOSE)])


class ToolParser:
    """Of one choice. names: tools that exist; a call of any other is text."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        self._step: Callable[[Parsed], bool] = self._text
        self._scan = _ObjectScan()
        self.num_calls = 0

    @property
    def is_inside_call(self) -> bool:
        """A call was begun and its arguments are not complete."""
        return self._step == self._arguments

    def push(self, text: str) -> Parsed:
        """Take the next piece of text."""
        parsed = Parsed()
        self._held += text
        while self._step(parsed):
            pass
        return parsed

    def flush(self) -> Parsed:
        """The text is over: what was held was no call."""
        held, self._held = self._held, ""
        if self._step == self._head:
            return Parsed(OPEN + held)
        is_text = self._step == self._text and not (self.num_calls and held.isspace())
        return Parsed(held if is_text else "")

    def _text(self, parsed: Parsed) -> bool:
        """Content up to the mark. White space behind a call is held, and dropped if another call follows."""
        before, mark, after = self._held.partition(OPEN)
        if mark:
            self._settle(parsed, before)
            self._held = after
            self._step = self._head
            return True
        keep = _overlap(self._held, OPEN)
        settled = self._held[: len(self._held) - keep]
        if settled and not (self.num_calls and settled.isspace()):
            parsed.content += settled
            self._held = self._held[len(settled) :]
        return False

    def _settle(self, parsed: Parsed, content: str) -> None:
        if not (self.num_calls and content.isspace()):
            parsed.content += content

    def _head(self, parsed: Parsed) -> bool:
        """From the mark to the arguments."""
        match = _HEAD.match(self._held)
        if match is not None and match.group(1) in self._names:
            parsed.calls.append(CallDelta(self.num_calls, id=_call_id(), name=match.group(1)))
            self.num_calls += 1
            self._held = self._held[match.end() :]
            self._scan = _ObjectScan()
            self._step = self._arguments
            return True
        if match is None and len(self._held) <= _MAX_HEAD and _HEAD_SO_FAR.fullmatch(self._held):
            return False
        parsed.content += OPEN
        self._step = self._text
        return True

    def _arguments(self, parsed: Parsed) -> bool:
        """The object, passed on as it comes."""
        length = self._scan.push(self._held)
        if length:
            parsed.calls.append(CallDelta(self.num_calls - 1, arguments=self._held[:length]))
            self._held = self._held[length:]
        if self._scan.depth:
            return False
        self._step = self._tail
        return True

    def _tail(self, _: Parsed) -> bool:
        """The rest of the call; if it is something else it is text again."""
        match = _TAIL.match(self._held)
        if match is None and _TAIL_SO_FAR.fullmatch(self._held):
            return False
        self._held = self._held[match.end() if match is not None else 0 :]
        self._step = self._text
        return True


class _ObjectScan:
    """Finds where a JSON object ends. depth: open braces and brackets."""

    def __init__(self) -> None:
        self.depth = 0
        self._in_string = False
        self._escaped = False

    def push(self, text: str) -> int:
        """How many characters of `text` belong to the object."""
        for position, character in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif character == "\\":
                    self._escaped = True
                elif character == '"':
                    self._in_string = False
            elif character == '"':
                self._in_string = True
            elif character in "{[":
                self.depth += 1
            elif character in "}]":
                self.depth -= 1
                if self.depth == 0:
                    return position + 1
        return len(text)


def _overlap(text: str, mark: str) -> int:
    """Length of the longest end of `text` that begins `mark`."""
    for length in range(min(len(text), len(mark) - 1), 0, -1):
        if text.endswith(mark[:length]):
            return length
    return 0


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"

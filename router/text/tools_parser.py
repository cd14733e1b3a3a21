"""Tool calls out of an answer's text, as it comes: content, and the calls' names and arguments.

In: text in pieces, no matter how it is cut. Out: what each piece settles. A call is an object with the name of a
known tool and its arguments, between marks, in a block of JSON or as the whole answer (router.text.tools_grammar).
Text is held back only while it can be the beginning of a call; what turns out to be none is content after all.
Arguments are passed on as they come.
"""

from __future__ import annotations

import re
import secrets
from collections.abc import Callable, Collection
from dataclasses import dataclass, field

from router.text.tools_grammar import CLOSE, FENCE_CLOSE, FENCE_OPEN, OPEN

_MAX_HEAD = 512  # characters of a call before its arguments


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


class _Form:
    """One way to write a call: what stands before and after its object."""

    def __init__(self, opening: str, closing: str) -> None:
        space, colon = r"\s*", (r"\s*", ":", r"\s*")
        begin = [*_letters(opening), space, r"\{", space, *_letters('"name"'), *colon, '"']
        middle = ['"', space, ",", space, *_letters('"arguments"'), *colon]
        self.first_character = opening[:1]
        self.head = re.compile("".join([*begin, "([A-Za-z0-9_-]+)", *middle, r"(?=\{)"]))
        self.head_so_far = _prefixes([*begin, "[A-Za-z0-9_-]*", *middle])
        tail = [space, r"\}", *([space, *_letters(closing)] if closing else [])]
        self.tail = re.compile("".join(tail))
        self.tail_so_far = _prefixes(tail)


def _prefixes(parts: list[str]) -> re.Pattern[str]:
    """Matches every beginning of the sequence of `parts`, each of which is matched whole or not at all."""
    pattern = ""
    for part in reversed(parts):
        pattern = f"(?:{part}{pattern})?"
    return re.compile(pattern)


def _letters(text: str) -> list[str]:
    return [re.escape(character) for character in text]


_FORMS = (_Form(OPEN, CLOSE), _Form(FENCE_OPEN, FENCE_CLOSE))
_BARE = _Form("", "")
_BEGINNINGS = re.compile("|".join(re.escape(form.first_character) for form in _FORMS))


class ToolParser:
    """Of one choice. names: tools that exist; a call of any other is text."""

    def __init__(self, names: Collection[str]) -> None:
        self._names = names
        self._held = ""
        self._at_start = True
        self._form = _BARE
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

    def flush(self, *, is_cut: bool = False) -> Parsed:
        """The text is over: what was held was no call. is_cut: by its length, so a call's beginning is no text."""
        held, self._held = self._held, ""
        is_cut_call = is_cut and held.lstrip().startswith(OPEN)
        is_text = self._step == self._text and not is_cut_call and not (self.num_calls and held.isspace())
        return Parsed(held if is_text else "")

    def _text(self, parsed: Parsed) -> bool:
        """Content up to where a call begins, or may begin."""
        if self._at_start and self._begins(_BARE, 0, parsed):
            return self._step != self._text
        for beginning in _BEGINNINGS.finditer(self._held):
            if any(self._begins(form, beginning.start(), parsed) for form in _FORMS):
                return self._step != self._text
        self._settle(parsed, len(self._held))
        return False

    def _begins(self, form: _Form, place: int, parsed: Parsed) -> bool:
        """Does a call of this form begin at `place` of the held text, or may it? What is before it is settled."""
        match = form.head.match(self._held, place)
        if match is not None and match.group(1) in self._names:
            before = self._held[:place]
            if not (self.num_calls and before.isspace()):
                parsed.content += before
            self._held = self._held[match.end() :]
            self._begin(form, match.group(1), parsed)
            return True
        short = len(self._held) - place <= _MAX_HEAD
        if match is None and short and form.head_so_far.fullmatch(self._held, place):
            self._settle(parsed, place)
            return True
        return False

    def _settle(self, parsed: Parsed, length: int) -> None:
        """Give out so much of the held text. White space behind a call waits for what follows it."""
        content = self._held[:length]
        if content and not (self.num_calls and content.isspace()):
            parsed.content += content
            self._held = self._held[length:]
            self._at_start = False

    def _begin(self, form: _Form, name: str, parsed: Parsed) -> None:
        parsed.calls.append(CallDelta(self.num_calls, id=_call_id(), name=name))
        self.num_calls += 1
        self._at_start = False
        self._form = form
        self._scan = _ObjectScan()
        self._step = self._arguments

    def _arguments(self, parsed: Parsed) -> bool:
        """The object, passed on as it comes."""
        length = self._scan.push(self._held)
        if length:
            parsed.calls.append(CallDelta(self.num_calls - 1, arguments=self._held[:length]))
            self._held = self._held[length:]
        if self._scan.depth or not self._scan.has_begun:
            return False
        self._step = self._tail
        return True

    def _tail(self, _: Parsed) -> bool:
        """The rest of the call; if it is something else it is text again."""
        match = self._form.tail.match(self._held)
        if match is None and self._form.tail_so_far.fullmatch(self._held):
            return False
        self._held = self._held[match.end() if match is not None else 0 :]
        self._step = self._text
        return True


class _ObjectScan:
    """Finds where a JSON object ends. depth: open braces and brackets."""

    def __init__(self) -> None:
        self.depth = 0
        self.has_begun = False
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
                self.has_begun = True
                self.depth += 1
            elif character in "}]":
                self.depth -= 1
                if self.depth == 0:
                    return position + 1
        return len(text)


def _call_id() -> str:
    return f"call_{secrets.token_hex(12)}"

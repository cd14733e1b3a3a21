"""Stop strings in a text that arrives in pieces: emit what cannot be part of a stop, hold only what can.

The stops of a request are compiled once into an Aho-Corasick automaton, which its choices share. The depth of
its state is the length of the longest tail that begins some stop: exactly what must be held. Each character
costs amortised constant time, however many stops there are and however long they are.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable
from dataclasses import dataclass

from shared.errors import InvalidRequest

MAX_STOPS = 128
MAX_STOP_CHARACTERS = 8192  # of all stops together; bounds the automaton a request may ask for


@dataclass(slots=True)
class _Node:
    """depth: characters from the root. ends: length of the longest stop that ends here, 0 if none does."""

    depth: int
    children: dict[str, int]
    fallback: int = 0
    ends: int = 0


class StopSet:
    """The stop strings of one request, ready to match. Empty strings are dropped; immutable after that."""

    def __init__(self, stops: Iterable[str] = ()) -> None:
        """Raises InvalidRequest above MAX_STOPS strings or MAX_STOP_CHARACTERS characters."""
        self.stops = tuple(dict.fromkeys(stop for stop in stops if stop))
        if len(self.stops) > MAX_STOPS:
            raise InvalidRequest(f"stop has more than {MAX_STOPS} strings", param="stop")
        if sum(map(len, self.stops)) > MAX_STOP_CHARACTERS:
            raise InvalidRequest(f"stop has more than {MAX_STOP_CHARACTERS} characters in all", param="stop")
        self.first_characters = frozenset(stop[0] for stop in self.stops)
        self._nodes = [_Node(depth=0, children={})]
        for stop in self.stops:
            self._insert(stop)
        self._link()

    def __bool__(self) -> bool:
        return bool(self.stops)

    def step(self, state: int, character: str) -> int:
        """The state after one more character; state 0 is the beginning."""
        nodes = self._nodes
        while True:
            following = nodes[state].children.get(character)
            if following is not None:
                return following
            if state == 0:
                return 0
            state = nodes[state].fallback

    def depth(self, state: int) -> int:
        """Length of the longest tail of the text that begins a stop."""
        return self._nodes[state].depth

    def ends(self, state: int) -> int:
        """Length of the longest stop that the text ends with now; 0 if none."""
        return self._nodes[state].ends

    def _insert(self, stop: str) -> None:
        nodes, state = self._nodes, 0
        for character in stop:
            child = nodes[state].children.get(character)
            if child is None:
                child = nodes[state].children[character] = len(nodes)
                nodes.append(_Node(depth=nodes[state].depth + 1, children={}))
            state = child
        nodes[state].ends = len(stop)

    def _link(self) -> None:
        """Breadth first, each node's fallback: the longest proper tail of its path that is a path too."""
        nodes = self._nodes
        queue = deque(nodes[0].children.values())
        while queue:
            state = queue.popleft()
            for character, child in nodes[state].children.items():
                nodes[child].fallback = self.step(nodes[state].fallback, character)
                queue.append(child)
            node = nodes[state]
            node.ends = node.ends or nodes[node.fallback].ends


class StopMatcher:
    """Finds the stop that begins first in the text of one choice, whatever pieces the text comes in.

    Of stops that begin at the same place the one that ends first wins. `push` and `flush` give text that is
    settled; once `matched` is set the text is over and they give nothing more.
    """

    def __init__(self, stops: StopSet, *, include: bool = False) -> None:
        """include: the stop itself belongs to the emitted text."""
        self._stops = stops
        self._include = include
        self._state = 0
        self._held = ""
        self._candidate: tuple[int, str] | None = None  # where it begins in the text held, and which it is
        self.matched: str | None = None

    def push(self, text: str) -> str:
        """Take the next piece of text; return what may be emitted now."""
        if self.matched is not None:
            return ""
        stops = self._stops
        if self._state == 0 and stops.first_characters.isdisjoint(text):
            return text
        base = len(self._held)
        self._held += text
        for position, character in enumerate(text, start=base + 1):
            self._state = stops.step(self._state, character)
            if self._settled(position):
                return self._end()
        if self._candidate is not None:
            return ""
        return self._release(len(self._held) - stops.depth(self._state))

    def flush(self) -> str:
        """The text is over: return what was held, or apply a match that a longer stop could have overtaken."""
        if self.matched is not None:
            return ""
        return self._end() if self._candidate is not None else self._release(len(self._held))

    def _settled(self, position: int) -> bool:
        """Note a stop that ends at `position` of the held text; True once none that begins earlier can come."""
        stops = self._stops
        length = stops.ends(self._state)
        if length and (self._candidate is None or position - length < self._candidate[0]):
            self._candidate = (position - length, self._held[position - length : position])
        if self._candidate is None:
            return False
        return position - stops.depth(self._state) >= self._candidate[0]

    def _end(self) -> str:
        assert self._candidate is not None
        begin, self.matched = self._candidate
        text = self._held[: begin + len(self.matched)] if self._include else self._held[:begin]
        self._held = ""
        return text

    def _release(self, length: int) -> str:
        text, self._held = self._held[:length], self._held[length:]
        return text

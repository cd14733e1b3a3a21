"""What brings the chunks of a PUT if not its body: a transport's own part on the receiving side."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from shared.kv.decoder import Slots
from shared.kv.section import Receive, Section
from shared.kv.stream import Stream


@dataclass(frozen=True, slots=True)
class Body:
    """The body of one PUT. receive: reads it. due: when a section must have come, on time.monotonic()."""

    receive: Receive
    due: Callable[[Section], float]
    stream: Stream


class Carrier(Protocol):
    """Kept with its connection from PUT to PUT; used by one thread."""

    @property
    def name(self) -> str:
        """The transport's, for logs and metrics."""
        ...

    def next_put(self, text: str) -> None:
        """A PUT whose head says this of the carrier. Raises InvalidRequest if that is not what it was made of."""
        ...

    def slots(self, body: Body) -> Slots:
        """How the chunks of one PUT arrive."""
        ...

    def close(self) -> None:
        """Give everything back; the connection is over."""
        ...


# Makes a carrier of a head's field, and of descriptors that came along: it takes those out that it keeps.
MakeCarrier = Callable[[str, list[int]], Carrier]

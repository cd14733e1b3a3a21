"""Where a request's time went: the stages of the design, and their one text form for headers and comments.

Durations only, in seconds; the router's parts from one monotonic clock, the workers' parts as they measured them.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields


@dataclass(slots=True)
class Stages:
    """Seconds per stage, in the order in which they happen.

    route: request read -> placement chosen. reserve: placement chosen -> reservation granted.
    queue, prefill: as the prefill worker measured. transfer: exposed part, first token sampled -> KV at decode.
    decode_queue, decode: as the decode worker measured. retry: spent in tries that failed, and until the next.
    relay: on the way between processes: the router's measure around the workers, less what they measured inside.
    total: request read -> last byte handed to the server.
    """

    route: float = 0.0
    reserve: float = 0.0
    queue: float = 0.0
    prefill: float = 0.0
    transfer: float = 0.0
    decode_queue: float = 0.0
    decode: float = 0.0
    relay: float = 0.0
    retry: float = 0.0
    total: float = 0.0

    @property
    def accounted(self) -> float:
        """Sum of all stages; what it lacks to `total` is the router's work on text and answer."""
        return float(sum(getattr(self, name) for name in STAGES if name != "total"))

    def as_ms(self, *, known: frozenset[str] | None = None) -> dict[str, float]:
        """Milliseconds by stage, three decimals; `known` limits the stages. A number that is none is left out."""
        found: dict[str, float] = {}
        for name in STAGES:
            value = getattr(self, name)
            wanted = known is None or name in known
            if not wanted or not math.isfinite(value) or (name == "retry" and value == 0):
                continue
            found[name] = round(max(value, 0.0) * 1e3, 3)
        return found


STAGES = tuple(field.name for field in fields(Stages))
"""Their names, in order."""

AT_FIRST_TOKEN = frozenset({"route", "reserve", "queue", "prefill", "retry"})
"""Stages that are known when the first token is."""


def server_timing(stages: Stages, *, known: frozenset[str] | None = None) -> str:
    """Value of a Server-Timing header: `route;dur=1.234, ...`, milliseconds."""
    return ", ".join(f"{name};dur={ms:.3f}" for name, ms in stages.as_ms(known=known).items())


def header_text(value: str, *, limit: int = 128) -> str:
    """Visible ASCII of a foreign text, cut to `limit`; every other character becomes "_"."""
    return "".join(c if "!" <= c <= "~" else "_" for c in value[:limit])

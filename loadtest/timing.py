"""The server's own account of a request: stage times and facts from headers and from the last SSE comment.

The server measures, this module only reads. Three places say the same thing at different times:
`Server-Timing` and `X-Handoff-*` headers (of a stream: what is known at the first token), and `:
server-timing {json}` at a stream's end. Milliseconds on the wire, seconds in here. What cannot be read is
left out, never guessed.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

STAGES = ("route", "reserve", "queue", "prefill", "transfer", "decode_queue", "decode", "relay", "retry")
"""In the order of a request's way; then the hops, and `retry` after a try that failed. They add up to `total`."""

TOTAL = "total"
COMMENT = "server-timing "
FACT_HEADER = "x-handoff-"

_METRIC = re.compile(r"""\s*([!#$%&'*+.^_`|~\w-]+)((?:\s*;\s*[\w-]+\s*=\s*(?:"[^"]*"|[^",;]*))*)\s*(?:,|$)""")
_PARAMETER = re.compile(r""";\s*([\w-]+)\s*=\s*(?:"([^"]*)"|([^",;]*))""")


@dataclass(frozen=True, slots=True)
class ServerTiming:
    """Stage name -> seconds, and everything else the server told (worker names, kv_bytes, transport, ...)."""

    stages_s: Mapping[str, float] = field(default_factory=dict)
    facts: Mapping[str, str] = field(default_factory=dict)

    def updated(self, later: ServerTiming) -> ServerTiming:
        """Both together; where they name the same thing the later one holds."""
        return ServerTiming({**self.stages_s, **later.stages_s}, {**self.facts, **later.facts})

    @property
    def total_s(self) -> float | None:
        """Request read to last byte, by the server's clock; None if it did not say."""
        return self.stages_s.get(TOTAL)

    @property
    def unaccounted_s(self) -> float | None:
        """What of the total no stage claims; None without a total."""
        if self.total_s is None:
            return None
        return self.total_s - sum(self.stages_s.get(stage, 0.0) for stage in STAGES)

    def number(self, fact: str) -> float | None:
        """A fact as a number; None if it is absent or none."""
        return _number(self.facts.get(fact))


def from_headers(headers: Iterable[tuple[str, str]]) -> ServerTiming:
    """Read `Server-Timing` (every occurrence) and `X-Handoff-*`; the rest is ignored."""
    stages_s: dict[str, float] = {}
    facts: dict[str, str] = {}
    for raw_name, value in headers:
        name = raw_name.lower()
        if name == "server-timing":
            stages_s.update(_server_timing(value))
        elif name.startswith(FACT_HEADER):
            facts[_key(name.removeprefix(FACT_HEADER))] = value
    return ServerTiming(stages_s, facts)


def from_comment(text: str) -> ServerTiming | None:
    """Read the comment that ends a stream; None if this comment is another one (a keep-alive, say)."""
    if not text.startswith(COMMENT):
        return None
    try:
        body = json.loads(text.removeprefix(COMMENT))
    except ValueError:
        return None
    if not isinstance(body, dict):
        return None
    stages_s: dict[str, float] = {}
    facts: dict[str, str] = {}
    for raw_name, value in _flat(body):
        name = _key(raw_name)
        stage = name.removesuffix("_ms")
        duration_ms = _number(value)
        if duration_ms is not None and (stage in STAGES or stage == TOTAL):
            stages_s[stage] = duration_ms / 1000
        elif isinstance(value, bool):
            facts[name] = str(value).lower()
        elif value is not None:
            facts[name] = value if isinstance(value, str) else json.dumps(value)
    return ServerTiming(stages_s, facts)


def _flat(body: Mapping[str, object]) -> Iterable[tuple[str, object]]:
    """Name and value, with one level of grouping objects taken apart."""
    for name, value in body.items():
        if isinstance(value, dict):
            yield from value.items()
        else:
            yield name, value


def _server_timing(value: str) -> dict[str, float]:
    found: dict[str, float] = {}
    for match in _METRIC.finditer(value):
        parameters = {p[1].lower(): p[2] or p[3] for p in _PARAMETER.finditer(match.group(2))}
        duration_ms = _number(parameters.get("dur"))
        if duration_ms is not None:
            found[_key(match.group(1))] = duration_ms / 1000
    return found


def _key(name: str) -> str:
    return name.strip().lower().replace("-", "_")


def _number(value: object) -> float | None:
    if isinstance(value, bool) or not isinstance(value, int | float | str):
        return None
    try:
        number = float(value)
    except ValueError:
        return None
    return number if math.isfinite(number) else None

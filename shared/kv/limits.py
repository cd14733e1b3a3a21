"""What one sending peer may cost a receiver."""

from __future__ import annotations

import time
from dataclasses import dataclass

from shared.kv.section import Section


@dataclass(frozen=True, slots=True)
class ReceiveLimits:
    """Defaults suit a prompt of 100k tokens.

    max_header_bytes: of the blob. head_s: for the HTTP head. idle_s: for the next section (header, batch of a
    chunk, trailer) to begin; longer than prefill needs for a chunk. grace_s + bytes / floor_bytes_per_s: for a
    section, once begun.
    keep_s: for another PUT on a connection. answer_s, drain_bytes: for our last word to reach a peer.
    """

    max_connections: int = 64
    max_head_bytes: int = 16 * 1024
    max_header_bytes: int = 8 * 1024 * 1024
    head_s: float = 10.0
    idle_s: float = 60.0
    grace_s: float = 10.0
    floor_bytes_per_s: float = 1024 * 1024
    keep_s: float = 60.0
    answer_s: float = 1.0
    drain_bytes: int = 8 * 1024 * 1024


class Pace:
    """Deadlines of one body: a sender may wait for prefill between sections, but not dawdle within one."""

    def __init__(self, limits: ReceiveLimits) -> None:
        self._limits = limits
        self._section: Section | None = None
        self._due = 0.0

    def deadline(self, section: Section) -> float:
        """When the next byte must be here at the latest, on time.monotonic()."""
        if section.taken_bytes == 0:
            return time.monotonic() + self._limits.idle_s
        if section is not self._section:
            self._section = section
            allowed_s = self._limits.grace_s + section.num_bytes / self._limits.floor_bytes_per_s
            self._due = time.monotonic() + allowed_s
        return self._due

"""Placement: which workers get a request. Pure; neither clock nor network nor state but a turn counter.

Least outstanding work, in tokens; equal ones take turns. `avoid` holds workers that just failed this request: they
are taken only when nothing else is left. `exclude` holds workers that refused it: they are not taken at all.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Generic, Protocol, TypeVar

from shared.wire import Fingerprint


class Candidate(Protocol):
    """What placement has to know of a usable worker."""

    @property
    def url(self) -> str: ...
    @property
    def fingerprint(self) -> Fingerprint: ...
    @property
    def outstanding_tokens(self) -> int: ...


C = TypeVar("C", bound=Candidate)


class LeastOutstanding(Generic[C]):
    """Chooses among candidates that are all usable; a choice among equals depends on the turn alone."""

    def __init__(self) -> None:
        self._turn = 0

    def one(
        self,
        candidates: Sequence[C],
        *,
        avoid: Collection[str] = (),
        exclude: Collection[str] = (),
        like: C | None = None,
    ) -> C | None:
        """The least loaded candidate; `like` limits them to those whose KV it understands."""
        fitting = [
            c
            for c in candidates
            if c.url not in exclude and (like is None or not c.fingerprint.differences(like.fingerprint))
        ]
        if not fitting:
            return None
        self._turn += 1
        return self._ranked(fitting, avoid)[0]

    def pair(
        self,
        prefill: Sequence[C],
        decode: Sequence[C],
        *,
        avoid: Collection[str] = (),
        exclude: Collection[str] = (),
    ) -> tuple[C, C] | None:
        """The least loaded prefill and decode worker with equal fingerprints; each side looks at its own load."""
        self._turn += 1
        prefill_ranked = self._ranked([c for c in prefill if c.url not in exclude], avoid)
        for d in self._ranked([c for c in decode if c.url not in exclude], avoid):
            for p in prefill_ranked:
                if not p.fingerprint.differences(d.fingerprint):
                    return p, d
        return None

    def _ranked(self, candidates: Sequence[C], avoid: Collection[str]) -> list[C]:
        """Best first: not avoided, then fewest tokens, then whose turn it is."""
        count = len(candidates)
        order = sorted(
            range(count),
            key=lambda i: (
                candidates[i].url in avoid,
                candidates[i].outstanding_tokens,
                (i - self._turn) % count,
            ),
        )
        return [candidates[i] for i in order]

"""Decode's side: the prefill workers that the library knows, and the memory that reads go to.

A read that has begun cannot be called off, and a peer that was stopped may let it go on minutes later. So a read
goes to memory of the connection (`nixl_landing`), and what has arrived is copied on. That memory is set aside if
the connection ends in the middle of a read, until the library says that the read has ended.
"""

from __future__ import annotations

import threading
from collections import OrderedDict, deque
from contextlib import suppress

from shared.kv.transports.base import TransportUnavailable
from shared.kv.transports.nixl_agent import NixlAgent, Read, ReadFailed
from shared.kv.transports.nixl_landing import LANDING_BYTES, Landing

_MAX_KEPT = 16
_MAX_ASIDE = 64
_MAX_IDLE_PEERS = 64


class _Known:
    """A peer in the books. num_users: connections of it, reads that were set aside included."""

    def __init__(self) -> None:
        self.num_users = 0
        self.is_broken = False


class NixlPeers:
    """Of one listener. Thread-safe. Landing areas: one a connection, some kept for later, some set aside."""

    def __init__(self, agent: NixlAgent) -> None:
        self.agent = agent
        self._lock = threading.Lock()
        self._known: OrderedDict[str, _Known] = OrderedDict()
        self._kept: list[Landing] = []
        self._num_landings = 0
        self._aside: deque[tuple[str, Landing]] = deque()

    @property
    def landing_bytes(self) -> int:
        """Memory that reads go to: of connections, kept for later ones, and set aside."""
        with self._lock:
            return self._num_landings * LANDING_BYTES

    def take(self, metadata: bytes) -> tuple[str, Landing]:
        """A connection begins: the peer's name, and memory to read to. Raises ReadFailed, TransportUnavailable."""
        with self._lock:
            self._reap()
            if len(self._aside) >= _MAX_ASIDE:
                raise ReadFailed("too many reads have not ended")
            name = self.agent.meet(metadata)
            known = self._known.setdefault(name, _Known())
            self._known.move_to_end(name)
            if known.is_broken:
                if known.num_users:
                    raise ReadFailed("the connection to the peer is broken")
                self.agent.forget(name)
                name = self.agent.meet(metadata)
                known.is_broken = False
            landing = self._kept.pop() if self._kept else self._new_landing()
            known.num_users += 1
            self._forget_oldest()
            return name, landing

    def give_back(self, name: str, landing: Landing, *, is_broken: bool) -> None:
        """A connection has ended; its reads may still go on."""
        with self._lock:
            self._known[name].is_broken |= is_broken
            self._aside.append((name, landing))
            self._reap()

    def close(self) -> None:
        """Drop everything that no read goes to any more; the rest stays until the process ends."""
        with self._lock:
            self._reap()
            while self._kept:
                with suppress(TransportUnavailable):
                    self._kept.pop().close()
                    self._num_landings -= 1
            for name, known in list(self._known.items()):
                if not known.num_users:
                    self.agent.forget(name)
                    del self._known[name]

    def _reap(self) -> None:
        """Take back what no read goes to; out of the books first, so that no failure gives it out twice."""
        for _ in range(len(self._aside)):
            name, landing = self._aside[0]
            landing.begun = [(read, slot) for read, slot in landing.begun if not _has_ended(read)]
            self._aside.popleft()
            if landing.begun:
                self._aside.append((name, landing))
                continue
            self._known[name].num_users -= 1
            self._keep(landing)

    def _new_landing(self) -> Landing:
        landing = Landing(self.agent)
        self._num_landings += 1
        return landing

    def _keep(self, landing: Landing) -> None:
        if len(self._kept) >= _MAX_KEPT:
            with suppress(TransportUnavailable):  # the library does not let it go: then it can still be used
                landing.close()
                self._num_landings -= 1
                return
        self._kept.append(landing)

    def _forget_oldest(self) -> None:
        idle = [name for name, known in self._known.items() if not known.num_users]
        for name in idle[:-_MAX_IDLE_PEERS]:
            self.agent.forget(name)
            del self._known[name]


def _has_ended(read: Read) -> bool:
    """Whether the library writes nothing more for it."""
    try:
        return read.done()
    except ReadFailed:
        return True

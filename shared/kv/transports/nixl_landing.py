"""Reads over NIXL go to a landing area: small, and so in the core's cache, whatever becomes of the read.

A batch is copied on to where it belongs, and digested. That is not slower than reading to there at once: the kernel
writes to the cache then, and the copy goes past it.
"""

from __future__ import annotations

import mmap
from collections.abc import Callable
from contextlib import suppress

from shared.kv.batch import Batch
from shared.kv.pool_memory import address_of
from shared.kv.section import Section
from shared.kv.told_chunk import TOLD_BATCH_BYTES, ToldChunk
from shared.kv.transports.nixl_agent import NixlAgent, Prepared, Ranges, Read, Registration
from shared.kv.transports.nixl_ranges import Ranged, packed

# Several are filled at once over a network; where reading is a call that ends at once, one does.
NUM_SLOTS = 2
SLOT_BYTES = TOLD_BATCH_BYTES
LANDING_BYTES = NUM_SLOTS * SLOT_BYTES

_SHORTEST_PAUSE_S = 0.00005
_LONGEST_PAUSE_S = 0.001


class Landing:
    """Registered memory that reads of one connection go to, and those that have begun, the oldest first.

    Raises TransportUnavailable.
    """

    def __init__(self, agent: NixlAgent) -> None:
        self._mapping = mmap.mmap(-1, LANDING_BYTES)
        self._view = memoryview(self._mapping)
        self._address = address_of(self._view)
        self._registered: Registration = agent.register((self._address, len(self._view)))
        self.begun: list[tuple[Read, int]] = []

    def address(self, slot: int) -> int:
        """Where a slot begins."""
        return self._address + slot * SLOT_BYTES

    def free_slot(self) -> int | None:
        """The first one that no read goes to: if reads end at once always the same, which stays in the cache."""
        taken = {slot for _, slot in self.begun}
        return next((slot for slot in range(NUM_SLOTS) if slot not in taken), None)

    def take(self, num_bytes: int) -> memoryview:
        """What the oldest read has brought, until the next one is begun."""
        at = self.begun.pop(0)[1] * SLOT_BYTES
        return self._view[at : at + num_bytes]

    def close(self) -> None:
        """Give the memory back; no read goes there any more. Raises TransportUnavailable: then it is as it was."""
        self._registered.close()
        self._view.release()
        with suppress(BufferError):
            self._mapping.close()


# Has the library look up ranges of ours and of the peer's. Raises ReadFailed.
Prepare = Callable[[Ranges, Ranges], Prepared]


class LandedReads:
    """The batches of one chunk: one at a time, or several if reading takes time.

    What the library looks up for them it looks up once, for all tensors and slots.
    """

    def __init__(self, landing: Landing, told: ToldChunk, remote: Ranged, prepare: Prepare) -> None:
        self._landing = landing
        self._told = told
        self._remote = remote
        self._prepare = prepare
        self._num_begun = 0
        self._rows: dict[tuple[int, int], _Rows] = {}

    def look_up(self) -> None:
        """What `next` will want, before there is KV. Raises ReadFailed."""
        self._rows_of(self._told.batches[0])

    def next(self, position: int, wait: Callable[[Section, float], None]) -> memoryview:
        """The bytes of a batch, until the next one is asked for. Called for each in order.

        wait: for the batch, so many seconds. Raises ReadFailed, and what `wait` raises.
        """
        landing, batches = self._landing, self._told.batches
        if not landing.begun:
            self._begin(0)
        pause_s, section = _SHORTEST_PAUSE_S, None
        while not landing.begun[0][0].done():
            slot = landing.free_slot() if self._num_begun < len(batches) else None
            if slot is not None and self._told.can_tell(self._num_begun):
                self._told.wait(self._num_begun)
                self._begin(slot)
            else:
                section = section or Section(batches[position].num_bytes, taken_bytes=1)
                wait(section, pause_s)
                pause_s = min(2 * pause_s, _LONGEST_PAUSE_S)
        return landing.take(batches[position].num_bytes)

    def close(self) -> None:
        """Let the library forget what it looked up. No read is under way; else each keeps what it needs."""
        for rows in self._rows.values():
            rows.prepared.close()
        self._rows.clear()

    def _begin(self, slot: int) -> None:
        batch = self._told.batches[self._num_begun]
        self._landing.begun.append((self._rows_of(batch).read(batch, slot), slot))
        self._num_begun += 1

    def _rows_of(self, batch: Batch) -> _Rows:
        """As looked up for the first batch with these rows."""
        rows = self._rows.get((batch.start, batch.end))
        if rows is None:
            rows = self._rows[batch.start, batch.end] = _Rows(
                self._landing, self._remote, batch, self._prepare
            )
        return rows


class _Rows:
    """The same rows of all tensors. first: the first batch of them; none has more tensors."""

    def __init__(self, landing: Landing, remote: Ranged, first: Batch, prepare: Prepare) -> None:
        ranges = remote.ranges(first.start, first.end)
        self._num_pieces = len(ranges) // remote.num_tensors
        self._slot_ranges = first.num_tensors * self._num_pieces
        wanted = ranges[: self._slot_ranges]
        slots = packed(wanted, [landing.address(slot) for slot in range(NUM_SLOTS)])
        self.prepared = prepare(slots, ranges)

    def read(self, batch: Batch, slot: int) -> Read:
        """Begin to read one batch to a slot."""
        num_ranges = batch.num_tensors * self._num_pieces
        return self.prepared.read(slot * self._slot_ranges, batch.first * self._num_pieces, num_ranges)

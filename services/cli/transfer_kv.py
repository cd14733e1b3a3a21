"""KV as a way of `handoff bench transfer`: sent, verified by digest, injected into a block pool, as in the workers.

Measured with all that a PUT needs; or as in a request, where the PUT is opened while prefill computes, until it is
answered or until decode may use it.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Executor
from dataclasses import dataclass

from shared.kv.block_views import BlockViews
from shared.kv.book import Received
from shared.kv.host_memory import own_memory
from shared.kv.manifest import Expected, Manifest, plan_chunks
from shared.kv.outgoing import Send
from shared.kv.pool_memory import PoolMemory
from shared.kv.progress import Progress
from shared.kv.receiver import Offer
from shared.kv.sender import KvSender
from shared.kv.shape import KvShape
from shared.kv.shared_memory import SharedMemory
from shared.kv.source import KvSink
from shared.kv.ticket import Ticket
from shared.wire import Handoff

# Qwen2.5-1.5B in bfloat16: 28 KiB a token, so 128 tokens are 3.5 MiB.
SHAPE = KvShape(num_layers=28, num_kv_heads=2, head_dim=128, dtype="BF16")
BLOCK_SIZE = 16
SECRET = b"handoff bench transfer"

Way = Callable[[int], float]

_BOOT = "bench"
_OPENING_S = 0.01  # longer than it takes
_COMPUTED = 256


def opened(transport: str) -> str:
    """The way by this transport whose PUT was opened before there was KV."""
    return f"{transport}, opened"


def injected(transport: str) -> str:
    """The same, which ends when decode may use the KV, and not when the sender knows it."""
    return f"{transport}, injected"


@dataclass(frozen=True)
class Setup:
    """max_tokens: the most that is sent. cores: of sender and receiver. scattered: no two blocks are neighbours."""

    max_tokens: int
    cores: tuple[int, int]
    scattered: bool
    transports: tuple[str, ...]


class Pool:
    """K and V of every layer, all memory touched, and one sequence's block table. As a worker has it.

    shareable: a peer may map it.
    """

    def __init__(self, setup: Setup, seed: int, *, shareable: bool = False) -> None:
        num_blocks = -(-setup.max_tokens // BLOCK_SIZE)
        self._block_table = list(range(num_blocks))
        if setup.scattered:
            random.Random(seed).shuffle(self._block_table)
        num_regions = SHAPE.num_tensors
        num_bytes = num_regions * num_blocks * BLOCK_SIZE * SHAPE.row_bytes
        shared = SharedMemory(num_bytes) if shareable else None
        content = own_memory(num_bytes) if shared is None else shared.content
        self.memory = PoolMemory(content, num_regions, num_blocks, BLOCK_SIZE, shared)
        page = random.Random(seed).randbytes(BLOCK_SIZE * SHAPE.row_bytes)
        for region in self.memory.regions:
            region[:] = page * num_blocks

    def views(self) -> BlockViews:
        """The sequence's KV."""
        return BlockViews(self.memory, self._block_table, SHAPE.row_bytes)


def reserved(handoff_id: str) -> Expected:
    """The reservation that an id stands for: `bench-<tokens>-<n>`."""
    return Expected(
        fingerprint="bench",
        handoff_id=handoff_id,
        epoch=1,
        token_hash="bench",  # noqa: S106 - no password
        from_token=0,
        num_tokens=int(handoff_id.split("-")[1]),
        num_choices=1,
        shape=SHAPE,
    )


class Claim:
    """Takes whatever comes (shared.kv.book.Claim)."""

    def __init__(self, expected: Expected, sink: KvSink, on_commit: Callable[[Received], None]) -> None:
        self.expected = expected
        self.sink = sink
        self._on_commit = on_commit

    def attach(self, abort: Callable[[], None]) -> None: ...

    def commit(self, received: Received) -> None:
        """Verified, and in the pool."""
        self._on_commit(received)

    def release(self) -> None: ...


class Book:
    """Grants whatever is asked for (shared.kv.book.ReceiveBook).

    expected: what an id stands for. on_commit: told when KV is in the pool.
    """

    def __init__(
        self,
        sink: KvSink,
        expected: Callable[[str], Expected],
        on_commit: Callable[[Received], None] = lambda _: None,
    ) -> None:
        self._sink = sink
        self._expected = expected
        self._on_commit = on_commit

    def claim(self, ticket: Ticket) -> Claim:
        """Of any ticket."""
        return Claim(self._expected(ticket.handoff_id), self._sink, self._on_commit)


def _compute(seconds: float) -> None:
    """What prefill does meanwhile: its core is not idle."""
    import torch  # noqa: PLC0415 - takes seconds, and `handoff bench --help` needs none of it

    until = time.perf_counter() + seconds
    weights = torch.ones(_COMPUTED, _COMPUTED)
    while time.perf_counter() < until:
        weights.mm(weights)


def kv_way(
    sender: KvSender,
    source: BlockViews,
    offer: Offer,
    numbers: Iterator[int],
    threads: Executor | None = None,
    injected_at: Callable[[], float] | None = None,
) -> Way:
    """One hand-off after another to `offer`.

    threads: on which to send, in order to open the PUT first. injected_at: on time.monotonic(), asked after the
    answer; then the time until the answer does not count.
    """

    def send(num_tokens: int) -> float:
        handoff_id = f"bench-{num_tokens}-{next(numbers)}"
        url = offer.kv_url(handoff_id)
        ticket = Ticket(
            handoff_id, 1, url, _BOOT, float("1e18"), host_id=offer.host_id, kv_socket=offer.kv_socket
        )
        handoff = Handoff(
            handoff_id=handoff_id,
            epoch=1,
            kv_url=url,
            ticket=ticket.sign(SECRET),
            have_tokens=0,
            transports=offer.transports,
        )
        want = reserved(handoff_id)
        manifest = Manifest(
            **{name: getattr(want, name) for name in Expected.__dataclass_fields__},
            chunks=plan_chunks(0, num_tokens, 0, SHAPE),
        )
        progress = Progress()
        outgoing = Send(handoff, "bench", manifest, source, progress)
        if threads is not None:
            sent = threads.submit(sender.send, outgoing)
            try:
                _compute(_OPENING_S)
                progress.finish([1], [False])
                answered_s = sent.result().transfer_s
            except BaseException:  # Ctrl-C: the thread would wait for KV
                progress.cancel("given up")
                raise
            assert progress.finished_at is not None
            return answered_s if injected_at is None else injected_at() - progress.finished_at
        progress.finish([1], [False])
        began = time.perf_counter()
        sender.send(outgoing)
        return time.perf_counter() - began

    return send

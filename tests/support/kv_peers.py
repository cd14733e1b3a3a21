"""The other side of a KV transfer as a process of its own, so that it can be killed in the middle of one.

Torch-free and quick to fork: `PEERS` is a fork server that has loaded this module already.
"""

from __future__ import annotations

import multiprocessing
import os
import signal
import threading
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from typing import Any

from shared.kv.block_views import BlockViews
from shared.kv.book import Received
from shared.kv.limits import ReceiveLimits
from shared.kv.manifest import Expected, Manifest, plan_chunks
from shared.kv.outgoing import Send, SendTimeouts
from shared.kv.pool_memory import PoolMemory
from shared.kv.progress import Progress
from shared.kv.put import PutReport
from shared.kv.receiver import KvListener
from shared.kv.sender import KvSender
from shared.kv.shape import Kind
from shared.kv.shared_memory import SharedMemory
from shared.kv.ticket import Ticket
from shared.kv.transports.choice import offered, usable
from shared.wire import Handoff

PEERS = multiprocessing.get_context("forkserver")
PEERS.set_forkserver_preload([__name__])
BOOT = "peer"
_BLOCK_SIZE = 16


class Zeros:
    """A sink that keeps nothing and stops for good after `most_chunks` of them."""

    def __init__(self, row_bytes: int, tell: Callable[[], None], most_chunks: int = 1) -> None:
        self._row_bytes = row_bytes
        self._tell = tell
        self._left = most_chunks

    def views(self, layer: int, kind: Kind, start: int, end: int) -> list[memoryview]:
        """Memory of the right size."""
        return [memoryview(bytearray((end - start) * self._row_bytes))]

    def chunk_filled(self, start: int, end: int) -> None:
        """Tell of it; the last one never returns."""
        self._left -= 1
        self._tell()
        if not self._left:
            threading.Event().wait()


def start(target: Callable[..., None], *args: Any) -> tuple[BaseProcess, Connection]:
    """A peer, and our end of its pipe."""
    ours, theirs = PEERS.Pipe()
    process = PEERS.Process(target=target, args=(theirs, *args), daemon=True)
    process.start()
    theirs.close()
    return process, ours


def kill(process: BaseProcess) -> None:
    """SIGKILL, and reap."""
    assert process.pid is not None
    os.kill(process.pid, signal.SIGKILL)
    process.join(10)
    assert process.exitcode == -signal.SIGKILL
    process.close()


def send_part(pipe: Connection, secret: bytes, handoff: Handoff, want: Expected, transport: str) -> None:
    """Send all but the end of a blob: `want` says what the reservation expects. Tells when it has sent a chunk."""
    quarter = max(1, (want.num_tokens - want.from_token) // 4)
    chunks = plan_chunks(want.from_token, want.num_tokens, quarter, want.shape)
    manifest = Manifest(
        **{name: getattr(want, name) for name in Expected.__dataclass_fields__}, chunks=chunks
    )
    progress = Progress()
    progress.advance(chunks[1][1])
    source, memory = zeros(want)
    is_ring = transport == "ring"
    transports = usable("shm" if is_ring else transport, pool=None if is_ring else memory, secret=secret)
    pipe.send("sending")
    sender = KvSender(secret, transports, SendTimeouts())
    sender.send(Send(handoff, "r1", manifest, source, progress))


def zeros(want: Expected) -> tuple[BlockViews, PoolMemory]:
    """A pool for one sequence, and where it lies."""
    num_blocks = -(-want.num_tokens // _BLOCK_SIZE)
    num_regions = want.shape.num_tensors
    shared = SharedMemory(num_regions * num_blocks * _BLOCK_SIZE * want.shape.row_bytes)
    memory = PoolMemory(shared.content, num_regions, num_blocks, _BLOCK_SIZE, shared)
    return BlockViews(memory, range(num_blocks), want.shape.row_bytes), memory


def receive_part(pipe: Connection, secret: bytes, template: Expected, transport: str) -> None:
    """Take one chunk of anything with a ticket, tell of it, and then nothing more. First tells its offer."""

    class Book:
        def claim(self, ticket: Ticket) -> Claim:
            return Claim(replace(template, handoff_id=ticket.handoff_id, epoch=ticket.epoch))

    class Claim:
        def __init__(self, expected: Expected) -> None:
            self.expected = expected
            self.sink = Zeros(expected.shape.row_bytes, lambda: pipe.send("chunk"))

        def attach(self, abort: Callable[[], None]) -> None: ...

        def commit(self, received: Received) -> None: ...

        def release(self) -> None: ...

    def on_end(report: PutReport) -> None:
        if report.error is not None:
            pipe.send(repr(report.error))

    offer = offered(transport)
    listener = KvListener(
        "127.0.0.1",
        0,
        Book(),
        secret=secret,
        limits=ReceiveLimits(),
        on_end=on_end,
        transports=offer.transports,
        nixl=offer.nixl,
    )
    listener.start()
    pipe.send(listener.offer("127.0.0.1"))
    with suppress(EOFError):
        pipe.recv()

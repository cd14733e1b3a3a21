"""Sending and receiving need no memory that grows with the prompt."""

from __future__ import annotations

import threading
import tracemalloc
from contextlib import closing

import pytest

from shared.kv.layout import BlobLayout
from shared.kv.outgoing import Send
from shared.kv.shape import KvShape
from shared.kv.transports.nixl_landing import LANDING_BYTES
from shared.kv.transports.nixl_peers import NixlPeers
from tests.unit.shared.kv.blobs import Pool, expected, manifest_for
from tests.unit.shared.kv.conftest import Agents, Listen, SenderOver
from tests.unit.shared.kv.transfer import TRANSPORTS, finished, granted, reservation

SHAPE = KvShape(num_layers=4, num_kv_heads=4, head_dim=64, dtype="BF16")
DEEP = KvShape(num_layers=28, num_kv_heads=1, head_dim=2, dtype="F16")
NUM_TOKENS = 16384
MOST_BYTES = 5 * 1024 * 1024


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("chunk_size", [0, 512])
@pytest.mark.parametrize("name", TRANSPORTS)
def test_temporary_memory_is_bounded(
    listen: Listen, sender_to: SenderOver, chunk_size: int, block_size: int
) -> None:
    """Both sides together need under 5 MiB beyond the pools for 64 MiB of KV, however it is cut and scattered.

    What is mapped does not count here: a segment of `shm`, the landing area of `nixl`. Of the latter there is one.
    """
    want = expected(num_tokens=NUM_TOKENS, shape=SHAPE)
    book = reservation(want)
    listening = listen(book)
    source = Pool(SHAPE, num_tokens=NUM_TOKENS, block_size=block_size, seed=1)
    manifest = manifest_for(want, chunk_size=chunk_size)
    handoff = granted(listening.listener.offer("127.0.0.1"))
    with closing(sender_to(source)) as sender:
        tracemalloc.start()
        try:
            sender.send(Send(handoff, "r1", manifest, source.views(), finished()))
            _, peak_bytes = tracemalloc.get_traced_memory()
            landing_bytes = listening.nixl.landing_bytes if listening.nixl else 0
        finally:
            tracemalloc.stop()
    assert NUM_TOKENS * SHAPE.bytes_per_token == BlobLayout(manifest).kv_bytes > 10 * MOST_BYTES
    assert peak_bytes < MOST_BYTES
    assert (LANDING_BYTES if listening.nixl else 0) == landing_bytes
    assert threading.active_count() < 10


@pytest.mark.parametrize("name", ["shm", "tcp"])
def test_temporary_memory_for_many_chunks_is_bounded(listen: Listen, sender_to: SenderOver) -> None:
    """The same for 128k tokens of a model of 28 layers, computed in chunks of 256: the header has bounded length.

    With a chunk in it for each that was computed it took 15 MiB.
    """
    want = expected(num_tokens=131072, shape=DEEP)
    book = reservation(want)
    handoff = granted(listen(book).listener.offer("127.0.0.1"))
    source = Pool(DEEP, num_tokens=want.num_tokens, block_size=256)
    manifest = manifest_for(want, chunk_size=256)
    with closing(sender_to(source)) as sender:
        tracemalloc.start()
        try:
            sender.send(Send(handoff, "r1", manifest, source.views(), finished()))
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert peak_bytes < MOST_BYTES


def test_landing_areas_are_bounded(nixl: Agents) -> None:
    """There is one a connection, of those that have ended 16 are kept, and none outlives all."""
    metadata = nixl.sending.metadata()
    peers = NixlPeers(nixl.receiving)
    for num_open, num_used, num_left in ((1, 1, 1), (20, 20, 16), (3, 16, 16)):
        taken = [peers.take(metadata) for _ in range(num_open)]
        assert num_used * LANDING_BYTES == peers.landing_bytes
        for name, landing in taken:
            peers.give_back(name, landing, is_broken=False)
        assert num_left * LANDING_BYTES == peers.landing_bytes
    peers.close()
    assert 0 == peers.landing_bytes

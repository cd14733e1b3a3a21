"""Sending and receiving need no memory that grows with the prompt."""

from __future__ import annotations

import threading
import tracemalloc
from contextlib import closing

import pytest

from shared.kv.layout import BlobLayout
from shared.kv.outgoing import Send
from shared.kv.shape import KvShape
from tests.unit.shared.kv.blobs import Pool, expected, manifest_for
from tests.unit.shared.kv.conftest import Listen, SenderOver
from tests.unit.shared.kv.transfer import TRANSPORTS, finished, granted, reservation

SHAPE = KvShape(num_layers=4, num_kv_heads=4, head_dim=64, dtype="BF16")
NUM_TOKENS = 8192
MOST_BYTES = 3 * 1024 * 1024


@pytest.mark.parametrize("block_size", [16, 256])
@pytest.mark.parametrize("chunk_size", [0, 512])
@pytest.mark.parametrize("name", TRANSPORTS)
def test_temporary_memory_is_bounded(
    listen: Listen, sender_to: SenderOver, chunk_size: int, block_size: int
) -> None:
    """Both sides together need under 3 MiB beyond the pools for 32 MiB of KV, however it is cut and scattered."""
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
        finally:
            tracemalloc.stop()
    assert NUM_TOKENS * SHAPE.bytes_per_token == BlobLayout(manifest).kv_bytes > 10 * MOST_BYTES
    assert peak_bytes < MOST_BYTES
    assert threading.active_count() < 10

"""Nothing of a layer leaves, or is named to a peer that would read it, before the layer is computed.

Told too early, both sides would read and digest the same stale bytes, and no digest would show it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from shared.kv.encoder import BlobEncoder
from shared.kv.layout import BlobLayout
from shared.kv.told_chunk import TOLD_BATCH_BYTES
from tests.unit.shared.kv.blobs import Pool, expected, manifest_for
from tests.unit.shared.kv.transfer import BIG

WANT = expected(num_tokens=2048, shape=BIG)
LAYOUT = BlobLayout(manifest_for(WANT, chunk_size=1024))


def sent(encoder: BlobEncoder, index: int) -> Iterator[int]:
    """Bytes that have left after each batch."""
    for batch in encoder.chunk(index):
        yield sum(map(len, batch))


def poured(encoder: BlobEncoder, index: int) -> Iterator[int]:
    """The same for slots."""
    slot = memoryview(bytearray(TOLD_BATCH_BYTES))
    yield from encoder.pour_chunk(index, TOLD_BATCH_BYTES, lambda: slot)


def left(encoder: BlobEncoder, index: int) -> Iterator[int]:
    """The same for what a peer may read."""
    for batches in encoder.leave_chunk(index, TOLD_BATCH_BYTES, peer_keeps_up=True):
        yield sum(batch.num_bytes for batch in batches)


@pytest.mark.parametrize("leave", [sent, poured, left])
@pytest.mark.parametrize("at_once", [1, 3, BIG.num_layers])
def test_no_layer_leaves_before_it_is_computed(
    leave: Callable[[BlobEncoder, int], Iterator[int]], at_once: int
) -> None:
    """For every batch of every chunk, whether layers come singly, by threes, or all together."""
    source = Pool(BIG, num_tokens=WANT.num_tokens, block_size=16, seed=1)
    computed = [0, 0]

    def wait(chunk: int, num_layers: int) -> int:
        """Some more layers than are there have run: as few as will do, and by `at_once`."""
        computed[chunk] = min(-(-num_layers // at_once) * at_once, BIG.num_layers)
        return computed[chunk]

    encoder = BlobEncoder(LAYOUT, source.views(), wait=wait)
    for chunk, (start, end) in enumerate(LAYOUT.manifest.chunks):
        layer_bytes = (end - start) * BIG.bytes_per_token // BIG.num_layers
        num_gone = 0
        for num_bytes in leave(encoder, chunk):
            num_gone += num_bytes
            assert num_gone <= computed[chunk] * layer_bytes
        assert num_gone == BIG.num_layers * layer_bytes

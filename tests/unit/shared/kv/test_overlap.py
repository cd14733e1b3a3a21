"""KV of the chunk that is being computed travels layer by layer, and never before it is there."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from shared.kv.outgoing import Send
from shared.kv.overlap import LayerOverlap
from shared.kv.progress import Progress
from shared.kv.shape import Kind
from tests.unit.shared.kv.blobs import Pool, expected, manifest_for
from tests.unit.shared.kv.conftest import Listen
from tests.unit.shared.kv.transfer import BIG, WAIT_S, granted, reservation, sender_over


@pytest.mark.parametrize(
    ("groups", "from_tokens", "num_tokens", "marks"),
    [
        (4, 1, 256, {6, 12, 18, 24}),
        (5, 1, 256, {4, 9, 14, 19, 24}),
        (1, 256, 256, {24}),
        (99, 1, 1, set(range(1, 25))),
        (0, 1, 256, set()),
        (4, 257, 256, set()),
    ],
)
def test_marks_end_with_the_last_layer(
    groups: int, from_tokens: int, num_tokens: int, marks: set[int]
) -> None:
    """Groups differ by a layer at most; short chunks, or none wanted, have no marks."""
    assert marks == LayerOverlap(groups, from_tokens).marks(24, num_tokens)


def test_only_marks_wake_the_sender() -> None:
    """Layers between two marks are not told, and those of a chunk say nothing about a longer one."""
    progress = Progress(marks=(2, 4))
    progress.advance(4)
    progress.advance_layers(10, 2)
    progress.advance_layers(10, 3)

    assert progress.wait_layers(4, 4)
    assert not progress.wait_layers(10, 2)
    for end, num_layers in ((10, 3), (11, 1)):
        with pytest.raises(Exception, match="in its time"):
            progress.wait_layers(end, num_layers, timeout_s=0)


class Growing:
    """A source of which only some layers of the last chunk are written; reading another is an error."""

    def __init__(self, pool: Pool, last_start: int) -> None:
        self._views = pool.views()
        self._last_start = last_start
        self.num_written = 0
        self.half_read = threading.Event()

    def views(self, layer: int, kind: Kind, start: int, end: int) -> Sequence[memoryview]:
        if start >= self._last_start:
            assert layer < self.num_written, f"layer {layer} of {self.num_written}"
            if (layer, kind) == (BIG.num_layers // 2 - 1, "v"):
                self.half_read.set()
        return self._views.views(layer, kind, start, end)


@pytest.mark.parametrize("name", ["ring", "unix", "tcp"])
def test_layers_travel_while_later_ones_compute(listen: Listen, name: str) -> None:
    """Half of the last chunk's layers is sent before the other half is computed; it arrives bit for bit.

    Not over NIXL, where the receiver reads a chunk as a whole.
    """
    want = expected(num_tokens=512, shape=BIG)
    book = reservation(want)
    pool = Pool(BIG, num_tokens=512, block_size=16, seed=1)
    source = Growing(pool, last_start=256)
    half = BIG.num_layers // 2
    progress = Progress(marks=(half, BIG.num_layers))
    progress.advance(256)
    handoff = granted(listen(book).listener.offer("127.0.0.1"))
    send = Send(handoff, "r1", manifest_for(want, chunk_size=256), source, progress)
    with closing(sender_over(name)) as sender, ThreadPoolExecutor() as threads:
        sending = threads.submit(sender.send, send)
        for layer in range(1, half + 1):
            source.num_written = layer
            progress.advance_layers(512, layer)
        assert source.half_read.wait(WAIT_S)
        for layer in range(half + 1, BIG.num_layers + 1):
            source.num_written = layer
            progress.advance_layers(512, layer)
        progress.finish([100], [False])
        assert sending.result(WAIT_S).hidden_s > 0
    assert pool.content() == book.pool.content()

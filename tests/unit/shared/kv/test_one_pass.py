"""A chunk copied and digested in one pass is, byte for byte and digest for digest, what two passes make of it."""

from __future__ import annotations

from typing import NamedTuple

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.kv import one_pass
from shared.kv.copy_rows import CopyRows, compiled
from shared.kv.pieces import ChunkBytes, Scratch
from shared.kv.quant_layout import blob_layout
from shared.kv.shape import KvShape
from tests.unit.shared.kv.blobs import Pool, expected, manifest_for

# Two rows are a block of the digest: blocks of 2 and 16 tokens are pieces that the code takes, of 1 are not.
SHAPE = KvShape(num_layers=3, num_kv_heads=2, head_dim=64, dtype="F32")
BATCH_BYTES = 5 * 1024  # some batches have several tensors, and long tensors are cut


class Sides(NamedTuple):
    """A prompt's tokens [start, end), and the block size of the pool on each side."""

    start: int
    end: int
    source_block: int
    target_block: int


@st.composite
def sides(draw: st.DrawFn) -> Sides:
    """Any chunk of a short prompt."""
    end = draw(st.integers(1, 40))
    size = st.sampled_from([1, 2, 16])
    return Sides(draw(st.integers(0, end - 1)), end, draw(size), draw(size))


class Both:
    """The same chunk in a source and a target of other bytes."""

    def __init__(self, drawn: Sides) -> None:
        want = expected(num_tokens=drawn.end, from_token=drawn.start, shape=SHAPE)
        layout = blob_layout(manifest_for(want, chunk_size=0))
        (chunk,) = layout.manifest.chunks
        self.source = Pool(SHAPE, num_tokens=drawn.end, block_size=drawn.source_block, seed=1)
        self.target = Pool(SHAPE, num_tokens=drawn.end, block_size=drawn.target_block, seed=2)
        self.sending = ChunkBytes(self.source.views(), layout, chunk)
        self.receiving = ChunkBytes(self.target.views(), layout, chunk)


def by_copying_from(drawn: Sides) -> tuple[list[int], list[bytes]]:
    """As over `shm`: from pool to pool. What the target's pool holds then, all of it."""
    both, scratch = Both(drawn), Scratch()
    views = both.source.views()
    both.receiving.look_up(views, 0)
    for batch in both.receiving.batches(BATCH_BYTES):
        both.receiving.copy_from(batch, views, 0, scratch)
    return both.receiving.digests, both.target.snapshot()


def by_way_of_a_buffer(drawn: Sides) -> tuple[list[int], list[bytes]]:
    """As with scattered blocks over `tcp`: out of one pool, into the other, digested on both sides."""
    both, scratch = Both(drawn), Scratch()
    both.receiving.look_up_buffer()
    for batch in both.sending.batches(BATCH_BYTES):
        memory = scratch.take(batch.num_bytes)
        both.sending.take_out(batch, memory)
        both.receiving.copy_in(batch, memory)
    assert both.sending.digests == both.receiving.digests
    return both.receiving.digests, both.target.snapshot()


def by_leaving(drawn: Sides) -> tuple[list[int], list[bytes]]:
    """As the sender over `shm` and `nixl`."""
    digests = []
    for through_caches in (False, True):
        both, scratch = Both(drawn), Scratch()
        for batch in both.sending.batches(BATCH_BYTES):
            both.sending.digest_left(batch, scratch, through_caches=through_caches)
        digests.append(both.sending.digests)
    assert digests[0] == digests[1]
    return digests[0], []


WAYS = [by_copying_from, by_way_of_a_buffer, by_leaving]


@given(sides(), st.sampled_from(WAYS))
def test_one_pass_and_two_are_the_same(drawn: Sides, way: object) -> None:
    """Whatever lies between the two pools; blocks of others stay as they were."""
    assert callable(way)
    in_one = way(drawn)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(one_pass, "compiled", lambda: None)
        in_two = way(drawn)
    assert in_two == in_one
    digests, content = in_one
    assert len(digests) == 2 * SHAPE.num_layers
    if content:
        both = Both(drawn)
        # By the plainest way there is.
        for layer, kind in both.source.buffers:
            source, target = (
                b"".join(pool.views().views(layer, kind, drawn.start, drawn.end))
                for pool in (both.source, both.target)
            )
            for view in both.target.views().views(layer, kind, drawn.start, drawn.end):
                view[:], source = source[: len(view)], source[len(view) :]
            assert target != source
        assert both.target.snapshot() == content


@pytest.mark.parametrize("way", WAYS)
@pytest.mark.parametrize(
    ("drawn", "is_taken"),
    [
        (Sides(0, 3, 16, 16), True),  # in one piece on either side
        (Sides(2, 40, 2, 16), True),  # scattered, cut where blocks of the digest end
        (Sides(0, 3, 1, 1), False),  # a piece is half a block of the digest
    ],
)
def test_which_chunks_take_one_pass(
    monkeypatch: pytest.MonkeyPatch, way: object, drawn: Sides, is_taken: bool
) -> None:
    """Else this file would compare two passes with two passes."""
    if compiled() is None:
        pytest.skip("there is no compiled code here")
    assert callable(way)
    calls = []
    call = CopyRows.__call__

    def counted(self: CopyRows, *args: object, **options: bool) -> list[int]:
        calls.append(options)
        return call(self, *args, **options)  # type: ignore[arg-type]

    monkeypatch.setattr(CopyRows, "__call__", counted)
    monkeypatch.setattr("tests.unit.shared.kv.test_one_pass.BATCH_BYTES", 1 << 20)
    way(drawn)
    assert is_taken == bool(calls)

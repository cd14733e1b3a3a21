"""Small pools, manifests and whole blobs for the tests of shared.kv."""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence

import numpy as np

from shared.kv.block_views import BlockViews
from shared.kv.book import Received
from shared.kv.decoder import BlobDecoder
from shared.kv.encoder import BlobEncoder
from shared.kv.floats import from_float32
from shared.kv.manifest import Expected, Manifest, plan_chunks, token_hash
from shared.kv.pool_memory import PoolMemory
from shared.kv.progress import FirstTokens
from shared.kv.quant_layout import blob_layout
from shared.kv.section import Section
from shared.kv.shape import KINDS, Kind, KvShape
from shared.kv.shared_memory import SharedMemory

SHAPE = KvShape(num_layers=2, num_kv_heads=2, head_dim=4, dtype="F32")
MAX_HEADER_BYTES = 64 * 1024


class Pool:
    """Blocks of random (or zero) bytes, and one sequence's scattered block table in it."""

    def __init__(
        self, shape: KvShape, *, num_tokens: int, block_size: int = 4, seed: int | None = None
    ) -> None:
        self.shape = shape
        self.num_tokens = num_tokens
        used = -(-num_tokens // block_size)
        num_blocks = used + 3
        rng = random.Random(seed)
        tensors = [(layer, kind) for layer in range(shape.num_layers) for kind in KINDS]
        size = num_blocks * block_size * shape.row_bytes
        shared = SharedMemory(len(tensors) * size)
        self.memory = PoolMemory(shared.content, len(tensors), num_blocks, block_size, shared)
        self.buffers: dict[tuple[int, Kind], memoryview] = dict(
            zip(tensors, self.memory.regions, strict=True)
        )
        if seed is not None:
            self.refill(seed)
            rng.seed(f"blocks {seed}")
        self.block_table = rng.sample(range(num_blocks), used)
        self.block_size = block_size

    def views(self) -> BlockViews:
        """Source or sink over the sequence's blocks."""
        return BlockViews(self.memory, self.block_table, self.shape.row_bytes)

    def refill(self, seed: int) -> None:
        """Other random bytes, in the same place."""
        rng = random.Random(seed)
        for buffer in self.buffers.values():
            buffer[:] = rng.randbytes(len(buffer))

    def content(self, start: int = 0) -> list[bytes]:
        """The bytes of [start, num_tokens) for each layer's K and V."""
        views = self.views()
        return [b"".join(views.views(layer, kind, start, self.num_tokens)) for layer, kind in self.buffers]

    def snapshot(self) -> list[bytes]:
        """Every byte of the pool, blocks of others included."""
        return [bytes(buffer) for buffer in self.buffers.values()]

    def erase(self, start: int) -> None:
        """Zero the bytes of [start, num_tokens)."""
        views = self.views()
        for layer, kind in self.buffers:
            for view in views.views(layer, kind, start, self.num_tokens):
                view[:] = bytes(len(view))

    def erased(self, snapshot: list[bytes], start: int) -> list[bytes]:
        """What `snapshot` of this pool becomes by `erase`."""
        now = self.snapshot()
        self._restore(snapshot)
        self.erase(start)
        result = self.snapshot()
        self._restore(now)
        return result

    def _restore(self, snapshot: list[bytes]) -> None:
        for buffer, content in zip(self.buffers.values(), snapshot, strict=True):
            buffer[:] = content


def pool_of_numbers(shape: KvShape, num_tokens: int, *, block_size: int = 4, seed: int = 1) -> Pool:
    """A pool full of finite numbers, some channels larger than others."""
    pool = Pool(shape, num_tokens=num_tokens, block_size=block_size, seed=seed)
    rng = np.random.default_rng(seed)
    channels = shape.num_kv_heads * shape.head_dim
    for buffer in pool.buffers.values():
        num_rows = len(buffer) // shape.row_bytes
        spread = np.exp(rng.normal(0, 2, channels))
        values = (rng.standard_normal((num_rows, channels)) * spread).astype(np.float32)
        from_float32(values, shape.dtype, buffer)
    return pool


def expected(
    *,
    num_tokens: int = 10,
    from_token: int = 0,
    num_choices: int = 1,
    shape: KvShape = SHAPE,
    handoff_id: str = "h1",
) -> Expected:
    """A reservation for the prompt 0, 1, 2, ..."""
    return Expected(
        fingerprint="f" * 32,
        handoff_id=handoff_id,
        epoch=7,
        token_hash=token_hash(range(num_tokens)),
        from_token=from_token,
        num_tokens=num_tokens,
        num_choices=num_choices,
        shape=shape,
    )


def manifest_for(want: Expected, *, chunk_size: int = 4) -> Manifest:
    """The manifest of a sender that means exactly this reservation."""
    return Manifest(
        fingerprint=want.fingerprint,
        handoff_id=want.handoff_id,
        epoch=want.epoch,
        token_hash=want.token_hash,
        from_token=want.from_token,
        num_tokens=want.num_tokens,
        num_choices=want.num_choices,
        shape=want.shape,
        chunks=plan_chunks(want.from_token, want.num_tokens, chunk_size, want.shape),
    )


def first_tokens(num_choices: int, first: int = 100) -> FirstTokens:
    """Distinct token ids; every second choice has ended."""
    return FirstTokens(
        tuple(first + i for i in range(num_choices)), tuple(i % 2 == 1 for i in range(num_choices))
    )


def encode(manifest: Manifest, pool: Pool, *, first_token: int = 100) -> bytes:
    """The whole blob of a pool's sequence."""
    layout = blob_layout(manifest)
    encoder = BlobEncoder(layout, pool.views())
    pieces = list(encoder.header())
    for index in range(len(manifest.chunks)):
        for batch in encoder.chunk(index):
            pieces += map(bytes, batch)
    pieces.append(encoder.trailer().of(first_tokens(manifest.num_choices, first_token)))
    return b"".join(pieces)


class LoggedSink:
    """A sink that tells in which order it was asked."""

    def __init__(self, inner: BlockViews, log: list[tuple[str, int, int]]) -> None:
        self._inner = inner
        self._log = log

    def views(self, layer: int, kind: Kind, start: int, end: int) -> Sequence[memoryview]:
        self._log.append(("views", start, end))
        return self._inner.views(layer, kind, start, end)

    def chunk_filled(self, start: int, end: int) -> None:
        self._log.append(("filled", start, end))


def decode(
    blob: bytes,
    want: Expected,
    pool: Pool,
    *,
    step: Callable[[int], int] = lambda room: room,
    total: int | None = None,
    max_header_bytes: int = MAX_HEADER_BYTES,
    log: list[tuple[str, int, int]] | None = None,
) -> Received:
    """Feed a blob to a decoder, `step(room)` bytes at a time, as a socket would."""
    decoder = BlobDecoder(
        want,
        pool.views() if log is None else LoggedSink(pool.views(), log),
        total_bytes=len(blob) if total is None else total,
        max_header_bytes=max_header_bytes,
    )
    at = 0

    def receive(buffers: Sequence[memoryview], section: Section) -> int:
        nonlocal at
        room = sum(len(buffer) for buffer in buffers)
        num_bytes = min(max(1, step(room)), room, len(blob) - at)
        scatter(blob[at : at + num_bytes], buffers)
        at += num_bytes
        return num_bytes

    return decoder.read(receive)


def scatter(content: bytes, buffers: Sequence[memoryview]) -> None:
    """What recvmsg_into does."""
    for buffer in buffers:
        taken = min(len(buffer), len(content))
        buffer[:taken] = content[:taken]
        content = content[taken:]

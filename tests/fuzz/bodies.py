"""What a fuzzer feeds beside exact blobs: quantised ones, those whose KV is read elsewhere, introductions."""

from __future__ import annotations

import contextlib
import socket
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace

from shared.errors import HandoffError, InvalidRequest, TransportFailed
from shared.kv import told_chunk
from shared.kv.carrier import Body
from shared.kv.decoder import BlobDecoder
from shared.kv.encoder import BlobEncoder
from shared.kv.layout import BlobLayout
from shared.kv.pieces import Scratch
from shared.kv.section import Receive, Section
from shared.kv.shape import KvShape
from shared.kv.stream import Stream
from shared.kv.transports.nixl_wire import Introduction
from shared.kv.transports.shm_reads import PoolSlots
from shared.kv.transports.shm_wire import Terms
from tests.unit.shared.kv.blobs import (
    MAX_HEADER_BYTES,
    Pool,
    encode,
    expected,
    first_tokens,
    manifest_for,
    pool_of_numbers,
    scatter,
)

SHAPE = KvShape(num_layers=2, num_kv_heads=1, head_dim=2, dtype="F16")
WANT = expected(num_tokens=6, shape=SHAPE, num_choices=2)
_MANIFEST = manifest_for(WANT)
_SOURCE = pool_of_numbers(SHAPE, 6)
_MEMORY = _SOURCE.memory
_TERMS = Terms(len(_MEMORY.regions), _MEMORY.num_blocks, _MEMORY.block_size)
_SECRET = b"the secret of the fuzzer"
_INTRODUCTION = Introduction(b"metadata", (1, 2, 3, 4))


def _told() -> bytes:
    layout = BlobLayout(_MANIFEST)
    encoder = BlobEncoder(layout, _SOURCE.views())
    parts = [layout.header, told_chunk.blocks_message(encoder)]
    for index in range(len(_MANIFEST.chunks)):
        parts += [message for message, _ in told_chunk.messages(encoder, index, peer_keeps_up=True)]
    return b"".join((*parts, encoder.trailer().of(first_tokens(WANT.num_choices))))


QUANTISED = encode(_MANIFEST.quantised("int8"), _SOURCE)
TOLD = _told()
INTRODUCTION = _INTRODUCTION.pack(_SECRET)


def receive_of(data: bytes) -> Receive:
    """A body that is all there."""
    left = memoryview(data)

    def receive(buffers: Sequence[memoryview], section: Section) -> int:
        nonlocal left
        taken = min(len(left), sum(len(buffer) for buffer in buffers))
        scatter(bytes(left[:taken]), buffers)
        left = left[taken:]
        return taken

    return receive


def quantised(data: bytes) -> None:
    """Arrive as the body of a PUT to a reservation that takes quantised KV."""
    decoder = BlobDecoder(
        replace(WANT, kv_wire="int8"),
        Pool(SHAPE, num_tokens=6).views(),
        total_bytes=len(data),
        max_header_bytes=MAX_HEADER_BYTES,
    )
    with contextlib.suppress(InvalidRequest, HandoffError):
        received = decoder.read(receive_of(data))
        assert data != QUANTISED or "int8" == received.kv_wire


def told(data: bytes) -> None:
    """Arrive as the body of a PUT whose KV is read from a pool that both sides map."""
    pool = Pool(SHAPE, num_tokens=6)
    ours, theirs = socket.socketpair()
    with closing(theirs), closing(Stream(ours)) as stream:
        receive = receive_of(data)
        body = Body(receive, lambda _: 0.0, stream)
        decoder = BlobDecoder(
            WANT,
            pool.views(),
            total_bytes=len(data),
            max_header_bytes=MAX_HEADER_BYTES,
            slots=PoolSlots(_MEMORY, _TERMS, Scratch(), body),
        )
        with contextlib.suppress(InvalidRequest, HandoffError):
            decoder.read(receive)
            assert _SOURCE.content() == pool.content(), "other KV than the sender's was accepted"


def introduction(data: bytes) -> None:
    """Arrive as what a prefill worker says of itself over NIXL."""
    with contextlib.suppress(TransportFailed):
        assert _INTRODUCTION == Introduction.unpack(data, _SECRET), (
            "somebody else's introduction was accepted"
        )

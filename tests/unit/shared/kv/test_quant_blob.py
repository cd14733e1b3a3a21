"""Quantised KV on the wire: it arrives as quantising alone would make it, and comes only where it is wanted."""

from __future__ import annotations

import threading
import tracemalloc
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import safetensors
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from shared.errors import DigestMismatch, ManifestMismatch
from shared.kv.layout import total_bytes_bounds
from shared.kv.limits import ReceiveLimits
from shared.kv.manifest import MAX_CHUNKS, MAX_QUANTISED_TOKENS, Expected, Manifest, plan_chunks
from shared.kv.outgoing import Send
from shared.kv.progress import Progress
from shared.kv.quant import Quantised, Quantiser
from shared.kv.quant_layout import blob_layout
from shared.kv.shape import ITEMSIZE_BYTES, KINDS, WIRE_FORMATS, Kind, KvDtype, KvShape, WireFormat
from tests.unit.shared.kv.blobs import (
    Pool,
    decode,
    encode,
    expected,
    first_tokens,
    manifest_for,
    pool_of_numbers,
)
from tests.unit.shared.kv.conftest import Listen
from tests.unit.shared.kv.transfer import BIG, WAIT_S, finished, granted, reservation, sender_over

HEADER_BYTES = 1 << 20


def as_quantised(pool: Pool, manifest: Manifest, wire: WireFormat) -> list[bytes]:
    """What quantising and dequantising each chunk makes of the sequence's KV."""
    quantiser = Quantiser(pool.shape, wire)
    views = pool.views()
    results = []
    for layer in range(pool.shape.num_layers):
        for kind in KINDS:
            result = b""
            for start, end in manifest.chunks:
                content = b"".join(views.views(layer, kind, start, end))
                sizes = (quantiser.code_bytes(end - start), *[quantiser.scale_bytes(end - start)] * 2)
                quantised = Quantised(*(memoryview(bytearray(size)) for size in sizes))
                quantiser.quantise(memoryview(content), quantised)
                came = memoryview(bytearray(len(content)))
                quantiser.dequantise(quantised, came)
                result += came
            results.append(result)
    return results


def wanting(wire: WireFormat | None, shape: KvShape, num_tokens: int, from_token: int = 0) -> Expected:
    """A reservation that takes quantised KV."""
    return replace(expected(num_tokens=num_tokens, from_token=from_token, shape=shape), kv_wire=wire)


@settings(max_examples=60, deadline=None)
@given(st.data())
def test_round_trip(data: st.DataObject) -> None:
    """It comes out alike whatever dtype, block sizes, chunks and suffix; all other memory stays as it was."""
    wire = data.draw(st.sampled_from(WIRE_FORMATS))
    dtype = data.draw(st.sampled_from(list(ITEMSIZE_BYTES)))
    shape = KvShape(data.draw(st.integers(1, 3)), data.draw(st.integers(1, 3)), 4, dtype)
    num_tokens = data.draw(st.integers(1, 150))
    from_token = data.draw(st.integers(0, num_tokens))
    want = wanting(wire, shape, num_tokens, from_token)
    block_sizes = st.sampled_from([1, 3, 16, 256])
    source = pool_of_numbers(shape, num_tokens, block_size=data.draw(block_sizes))
    sink = Pool(shape, num_tokens=num_tokens, block_size=data.draw(block_sizes), seed=2)
    before = sink.snapshot()
    manifest = manifest_for(want, chunk_size=data.draw(st.integers(0, 90))).quantised(wire)

    blob = encode(manifest, source)
    steps = st.integers(1, 2000)
    received = decode(
        blob, want, sink, step=lambda room: min(room, data.draw(steps)), max_header_bytes=HEADER_BYTES
    )

    assert first_tokens(1) == received.first
    assert ((num_tokens - from_token) * shape.bytes_per_token, len(blob)) == (
        received.kv_bytes,
        received.wire_bytes,
    )
    assert wire == received.kv_wire
    assert as_quantised(source, manifest, wire) == sink.content(from_token)
    sink.erase(from_token)
    assert sink.erased(before, from_token) == sink.snapshot()


@pytest.mark.parametrize(("wire", "dtype"), [("int8", torch.int8), ("fp8", torch.float8_e4m3fn)])
def test_blob_is_a_safetensors_file(tmp_path: Path, wire: WireFormat, dtype: torch.dtype) -> None:
    """Any safetensors reader finds codes, scales and offsets, and can make the numbers of them."""
    shape = KvShape(2, 2, 4, "F32")
    pool = pool_of_numbers(shape, 70)
    manifest = manifest_for(wanting(wire, shape, 70), chunk_size=40).quantised(wire)
    path = tmp_path / "blob.safetensors"
    path.write_bytes(encode(manifest, pool))

    with safetensors.safe_open(path, "pt") as opened:
        assert wire == opened.metadata()["kv_wire"]
        assert {span.name for span in blob_layout(manifest).spans()} == set(opened.keys())
        codes = opened.get_tensor("chunk.0000.layer.01.v")
        scale, offset = (opened.get_tensor(f"chunk.0000.layer.01.v.{name}") for name in ("scale", "offset"))
    assert (dtype, (40, 2, 4)) == (codes.dtype, tuple(codes.shape))
    assert (2, 2, 4) == tuple(scale.shape) == tuple(offset.shape)
    groups = torch.arange(40) // 32
    numbers = codes.float() * scale.float()[groups] + offset.float()[groups]
    in_pool = np.frombuffer(b"".join(pool.views().views(1, "v", 0, 40)), np.float32).reshape(40, 2, 4)
    allowed = scale.float()[groups] * (0.501 if wire == "int8" else 16.1)
    assert ((numbers - torch.from_numpy(in_pool.copy())).abs() <= allowed).all()


@pytest.mark.parametrize("wire", WIRE_FORMATS)
def test_every_damaged_byte_is_found(wire: WireFormat) -> None:
    """Digests are of what travels: codes, scales and offsets; a damaged scale that is no number is damage too."""
    shape = KvShape(1, 1, 4, "F16")
    want = wanting(wire, shape, 5)
    blob = encode(manifest_for(want).quantised(wire), pool_of_numbers(shape, 5))
    layout = blob_layout(manifest_for(want).quantised(wire))
    for at in range(layout.total_bytes - layout.data_bytes, len(blob)):
        damaged = bytearray(blob)
        damaged[at] ^= 0x7C
        with pytest.raises((DigestMismatch, ManifestMismatch)):
            decode(bytes(damaged), want, Pool(shape, num_tokens=5), max_header_bytes=HEADER_BYTES)


@pytest.mark.parametrize(("offered", "sent"), [(None, "int8"), ("fp8", "int8")])
def test_what_was_not_offered_is_refused(offered: WireFormat | None, sent: WireFormat) -> None:
    """Quantised KV that the reservation does not want is a mismatch, and nothing is written."""
    shape = KvShape(1, 1, 4, "F32")
    blob = encode(manifest_for(wanting(sent, shape, 5)).quantised(sent), pool_of_numbers(shape, 5))
    sink = Pool(shape, num_tokens=5, seed=2)
    before = sink.snapshot()
    with pytest.raises(ManifestMismatch, match="kv_wire"):
        decode(blob, wanting(offered, shape, 5), sink, max_header_bytes=HEADER_BYTES)
    assert before == sink.snapshot()


def test_exact_kv_is_welcome_where_quantised_kv_is() -> None:
    """A reservation that takes quantised KV takes exact KV as well, bit for bit."""
    shape = KvShape(2, 1, 4, "F32")
    source, sink = pool_of_numbers(shape, 9), Pool(shape, num_tokens=9, seed=2)
    want = wanting("int8", shape, 9)
    received = decode(encode(manifest_for(want), source), want, sink)
    assert (None, source.content()) == (received.kv_wire, sink.content())


@pytest.mark.parametrize("number", [np.float32(1e9), np.float32("inf"), np.float32("nan")], ids=str)
def test_kv_that_cannot_be_quantised_is_sent_exact(listen: Listen, number: np.float32) -> None:
    """A number beyond float16 late in the prompt: broken off, and sent again as it is; the request used to fail."""
    shape = KvShape(num_layers=2, num_kv_heads=2, head_dim=4, dtype="F32")
    want = wanting("int8", shape, 300)
    source, book = pool_of_numbers(shape, 300), reservation(want)
    for view in source.views().views(1, "k", 299, 300):
        np.frombuffer(view, np.float32)[1] = number
    listening = listen(book)
    handoff = granted(listening.listener.offer("127.0.0.1")).model_copy(update={"kv_wire": "int8"})
    manifest = replace(manifest_for(want, chunk_size=64), kv_wire=None)
    with closing(sender_over("tcp")) as sender:
        sent = sender.send(Send(handoff, "r1", manifest, source.views(), finished(), kv_wire="int8"))

    assert ("tcp", None) == (sent.transport, sent.kv_wire)
    assert source.content() == book.pool.content()
    for _ in range(2):
        listening.next_report()
    assert [200, 400] == sorted(report.status for report in listening.reports)
    assert (2, 2) == book.settled()


def test_long_chunks_are_cut() -> None:
    """A whole tensor of a quantised chunk is in memory at once, so its length is bounded; else KV goes as it is."""
    shape = KvShape(1, 1, 4, "F32")
    manifest = manifest_for(expected(num_tokens=2 * MAX_QUANTISED_TOKENS + 5, shape=shape), chunk_size=0)
    cut = manifest.quantised("int8")
    assert ("int8", (1024, 1024, 5)) == (cut.kv_wire, tuple(end - start for start, end in cut.chunks))
    with pytest.raises(ValueError, match="quantised"):
        replace(manifest, kv_wire="int8")
    num_tokens = (MAX_CHUNKS + 1) * MAX_QUANTISED_TOKENS
    longest = replace(manifest, num_tokens=num_tokens, chunks=plan_chunks(0, num_tokens, 0, shape))
    assert longest == longest.quantised("int8")


@pytest.mark.parametrize("num_layers", [28, 48, 80])
def test_a_long_prompt_can_be_quantised(num_layers: int) -> None:
    """The header of Qwen2.5's longest prompt is one that decode takes, whatever chunks it was computed in.

    From 44k tokens on it was too long with 80 layers, and the request failed.
    """
    shape = KvShape(num_layers, 8, 128, "BF16")
    manifest = manifest_for(expected(num_tokens=131072, shape=shape), chunk_size=256).quantised("int8")
    assert "int8" == manifest.kv_wire
    assert len(blob_layout(manifest).header) <= ReceiveLimits().max_header_bytes


def test_kv_goes_exact_if_its_header_would_be_too_long() -> None:
    """Rather than being refused."""
    shape = KvShape(80, 8, 128, "BF16")
    manifest = manifest_for(expected(num_tokens=160_000, shape=shape), chunk_size=256)
    assert manifest == manifest.quantised("int8")


@pytest.mark.parametrize("wire", WIRE_FORMATS)
@pytest.mark.parametrize("name", ["shm", "unix", "tcp"])
@pytest.mark.parametrize("dtype", list(ITEMSIZE_BYTES))
def test_slow_ways_carry_it(listen: Listen, name: str, dtype: KvDtype, wire: WireFormat) -> None:
    """TCP carries quantised KV if both sides want it; what stays in a host's memory is exact."""
    shape = KvShape(num_layers=2, num_kv_heads=2, head_dim=16, dtype=dtype)
    want = wanting(wire, shape, 300)
    manifest = replace(manifest_for(want, chunk_size=128), kv_wire=None)
    source, book = pool_of_numbers(shape, 300), reservation(want)
    listening = listen(book)
    handoff = granted(listening.listener.offer("127.0.0.1")).model_copy(update={"kv_wire": wire})
    with closing(sender_over(name, pool=source)) as sender:
        sent = sender.send(Send(handoff, "r1", manifest, source.views(), finished(), kv_wire=wire))
    received = listening.next_report().received
    assert received is not None
    assert (sent.kv_bytes, sent.wire_bytes, sent.kv_wire) == (
        received.kv_bytes,
        received.wire_bytes,
        received.kv_wire,
    )
    assert 300 * shape.bytes_per_token == sent.kv_bytes
    if name == "tcp":
        assert wire == sent.kv_wire
        assert as_quantised(source, manifest, wire) == book.pool.content()
    else:
        assert sent.kv_wire is None
        assert source.content() == book.pool.content()


@pytest.mark.parametrize("chunk_size", [1, 3, 64, 0])
@pytest.mark.parametrize("wire", [None, *WIRE_FORMATS])
def test_length_bounds_hold(chunk_size: int, wire: WireFormat | None) -> None:
    """Exact or quantised, in chunks of any size: the length is within the bounds known beforehand."""
    want = wanting("int8", KvShape(2, 2, 4, "F16"), 64)
    manifest = replace(manifest_for(want, chunk_size=chunk_size), kv_wire=wire)
    least, most = total_bytes_bounds(want, HEADER_BYTES)
    assert least <= blob_layout(manifest).total_bytes <= most


def test_temporary_memory_is_bounded(listen: Listen) -> None:
    """Both sides together need a few MiB beyond the pools for 32 MiB of KV in one chunk."""
    shape = KvShape(num_layers=4, num_kv_heads=4, head_dim=64, dtype="BF16")
    want = wanting("int8", shape, 8192)
    source = pool_of_numbers(shape, 8192, block_size=16)
    book = reservation(want)
    listening = listen(book)
    handoff = granted(listening.listener.offer("127.0.0.1")).model_copy(update={"kv_wire": "int8"})
    manifest = replace(manifest_for(want, chunk_size=0), kv_wire=None)
    with closing(sender_over("tcp")) as sender:
        tracemalloc.start()
        try:
            sent = sender.send(Send(handoff, "r1", manifest, source.views(), finished(), kv_wire="int8"))
            _, peak_bytes = tracemalloc.get_traced_memory()
        finally:
            tracemalloc.stop()
    assert 32 * 2**20 == sent.kv_bytes
    assert sent.wire_bytes < 0.6 * sent.kv_bytes
    assert peak_bytes < 5 * 2**20


@pytest.mark.parametrize(("ours", "theirs"), [(None, "int8"), ("int8", None), ("fp8", "int8")])
def test_both_sides_must_want_it(listen: Listen, ours: WireFormat | None, theirs: WireFormat | None) -> None:
    """One side alone, or another format: KV goes exact."""
    shape = KvShape(num_layers=2, num_kv_heads=2, head_dim=4, dtype="BF16")
    want = wanting(theirs, shape, 10)
    source, book = pool_of_numbers(shape, 10), reservation(want)
    listening = listen(book)
    handoff = granted(listening.listener.offer("127.0.0.1")).model_copy(update={"kv_wire": theirs})
    manifest = replace(manifest_for(want), kv_wire=None)
    with closing(sender_over("tcp")) as sender:
        sent = sender.send(Send(handoff, "r1", manifest, source.views(), finished(), kv_wire=ours))
    assert sent.kv_wire is None
    assert source.content() == book.pool.content()


class OnlyComputed:
    """A source that may be asked for nothing that is not computed; tells when V of a layer is read."""

    def __init__(self, pool: Pool) -> None:
        self._views = pool.views()
        self.num_computed = 0
        self.num_layers = 0
        self.layer_read = threading.Semaphore(0)

    def views(self, layer: int, kind: Kind, start: int, end: int) -> list[memoryview]:
        assert end <= self.num_computed or layer < self.num_layers
        if kind == "v":
            self.layer_read.release()
        return self._views.views(layer, kind, start, end)


def test_layers_of_the_last_chunk_travel_as_they_are_computed(listen: Listen) -> None:
    """Large tensors go one by one, each as soon as its layer is there."""
    want = wanting("int8", BIG, 512)
    pool, book = pool_of_numbers(BIG, 512), reservation(want)
    source, listening = OnlyComputed(pool), listen(book)
    handoff = granted(listening.listener.offer("127.0.0.1")).model_copy(update={"kv_wire": "int8"})
    manifest = replace(manifest_for(want, chunk_size=0), kv_wire=None)
    progress = Progress(marks=range(1, BIG.num_layers + 1))
    with closing(sender_over("tcp")) as sender, ThreadPoolExecutor(1) as threads:
        sending = threads.submit(sender.send, Send(handoff, "r1", manifest, source, progress, kv_wire="int8"))
        for layer in range(BIG.num_layers):
            source.num_layers = layer + 1
            progress.advance_layers(512, layer + 1)
            assert source.layer_read.acquire(timeout=WAIT_S)
        progress.finish((100,), (False,))
        assert "int8" == sending.result(WAIT_S).kv_wire
    assert as_quantised(pool, manifest, "int8") == book.pool.content()


def test_chunks_travel_while_later_ones_are_computed(listen: Listen) -> None:
    """A quantised chunk is there before the next one is computed, and none is read too early."""
    shape = KvShape(num_layers=2, num_kv_heads=2, head_dim=4, dtype="F32")
    want = wanting("int8", shape, 10)
    pool, book = pool_of_numbers(shape, 10), reservation(want)
    source, listening = OnlyComputed(pool), listen(book)
    handoff = granted(listening.listener.offer("127.0.0.1")).model_copy(update={"kv_wire": "int8"})
    manifest, progress = replace(manifest_for(want), kv_wire=None), Progress()
    with closing(sender_over("tcp")) as sender, ThreadPoolExecutor(1) as threads:
        send = Send(handoff, "r1", manifest, source, progress, kv_wire="int8")
        sending = threads.submit(sender.send, send)
        for end in (4, 8):
            source.num_computed = end
            progress.advance(end)
            assert book.chunk_arrived.acquire(timeout=10)
        source.num_computed = 10
        progress.finish((100,), (False,))
        assert "int8" == sending.result(10).kv_wire
    assert [(0, 4), (4, 8), (8, 10)] == book.filled
    assert as_quantised(pool, manifest, "int8") == book.pool.content()

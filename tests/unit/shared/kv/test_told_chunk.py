"""Chunks that the receiver reads from the sender's pool: what is told of them, and pools that nobody should map."""

from __future__ import annotations

import errno
import fcntl
import mmap
import os
import socket
import stat
import struct
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing, suppress

import pytest

from shared.errors import InvalidRequest, ManifestMismatch, ReservationGone, TransportFailed
from shared.kv import told_chunk
from shared.kv.carrier import Body
from shared.kv.encoder import BlobEncoder
from shared.kv.layout import BlobLayout
from shared.kv.outgoing import Send, SendTimeouts
from shared.kv.pieces import ChunkBytes
from shared.kv.pool_memory import Rows
from shared.kv.progress import Progress
from shared.kv.section import Section, read_section
from shared.kv.shape import KINDS
from shared.kv.shared_memory import SharedMemory
from shared.kv.stream import Stream
from shared.kv.ticket import Ticket
from shared.kv.told_chunk import TOLD_BATCH_BYTES, ToldBlocks, ToldChunk, read_blocks
from shared.kv.transports.shm import PoolConnection
from shared.kv.transports.shm_reads import MappedPools, map_pool
from shared.kv.transports.shm_wire import Terms
from tests.unit.shared.kv.blobs import SHAPE, Pool, expected, manifest_for
from tests.unit.shared.kv.book import OneClaim
from tests.unit.shared.kv.conftest import Listen, SenderOver
from tests.unit.shared.kv.transfer import BIG, WAIT_S, finished, granted, reservation, sender_over

WANT = expected(num_tokens=4096, shape=BIG)
LAYOUT = BlobLayout(manifest_for(WANT, chunk_size=4096))


def body_of(content: bytes, step: int = 1 << 20) -> Iterator[Body]:
    """The body of a PUT that is all there, at most `step` bytes at a time."""
    left = memoryview(content)

    def receive(buffers: Sequence[memoryview], section: Section) -> int:
        nonlocal left
        taken = min(len(buffers[0]), len(left), step)
        buffers[0][:taken] = left[:taken]
        left = left[taken:]
        return taken

    ours, theirs = socket.socketpair()
    theirs.close()
    stream = Stream(ours)
    with closing(stream):
        yield Body(receive, lambda _: 0.0, stream)


@pytest.fixture(scope="module")
def told() -> bytes:
    """What a sender says of a chunk of many batches."""
    encoder = BlobEncoder(LAYOUT, Pool(BIG, num_tokens=4096, block_size=16, seed=1).views())
    blocks = told_chunk.blocks_message(encoder)
    ((message, num_bytes),) = told_chunk.messages(encoder, 0, peer_keeps_up=True)
    assert LAYOUT.kv_bytes == num_bytes > 3 * TOLD_BATCH_BYTES
    assert len(blocks + message) == told_chunk.body_bytes(LAYOUT, 16)
    return blocks + message


def understood(body: Body, target: ChunkBytes) -> ToldBlocks:
    """The whole of it, until every batch can be read."""
    blocks = read_blocks(body, LAYOUT.manifest, 16)
    chunk = ToldChunk(body, target)
    for position in range(len(chunk.batches)):
        chunk.wait(position)
        assert chunk.can_tell(position)
    return blocks


@pytest.mark.parametrize("step", [1, 3, 1 << 20])
def test_a_chunk_is_understood_however_it_comes(told: bytes, step: int) -> None:
    """All at once or byte by byte."""
    source = Pool(BIG, num_tokens=4096, block_size=16, seed=1)
    target = ChunkBytes(source.views(), LAYOUT, (0, 4096))
    for body in body_of(told, step):
        assert source.block_table == list(understood(body, target).blocks)


@pytest.mark.parametrize(
    ("damage", "error"),
    [
        (lambda told: told[:-1], InvalidRequest),
        (lambda told: told[:100], InvalidRequest),
        (lambda told: told[:-4] + struct.pack("<I", 7), ManifestMismatch),
    ],
)
def test_what_is_no_chunk_is_refused(
    told: bytes, damage: Callable[[bytes], bytes], error: type[Exception]
) -> None:
    """Cut anywhere, or with a batch of another length."""
    target = ChunkBytes(Pool(BIG, num_tokens=4096, block_size=16).views(), LAYOUT, (0, 4096))
    for body in body_of(damage(told)):
        with pytest.raises(error):
            understood(body, target)


def test_shared_memory_is_its_users_alone() -> None:
    """Without a name, mode 0600; nobody shrinks it, and who maps it later cannot write."""
    memory = SharedMemory(4096)
    facts = os.fstat(memory.descriptor)
    assert (0, 0o600) == (facts.st_nlink, stat.S_IMODE(facts.st_mode))
    with pytest.raises(PermissionError):
        os.ftruncate(memory.descriptor, 0)
    memory.content[:4] = b"seen"
    reader = map_pool(memory.descriptor, Terms(1, 1, 1)).regions[0]
    assert b"seen" == bytes(reader[:4])
    with pytest.raises(TypeError):
        reader[:4] = b"mine"
    with pytest.raises(PermissionError):
        os.pwrite(memory.descriptor, b"mine", 0)
    with pytest.raises(PermissionError):
        mmap.mmap(memory.descriptor, 4096)


def test_shared_memory_that_can_never_be_had_is_refused() -> None:
    """At the start; a file of that size could be made, and the first touch of it would kill."""
    with pytest.raises(OSError, match="memory"):
        SharedMemory(1 << 46)


def unsealed() -> list[int]:
    """Memory that its owner could take away from under a reader."""
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(descriptor, 4096)
    return [descriptor]


def empty() -> list[int]:
    """Sealed, and nothing in it."""
    descriptor = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return [descriptor]


def shared() -> list[int]:
    """A descriptor of sound memory."""
    memory = SharedMemory(4096)
    return [os.dup(memory.descriptor)]


@pytest.mark.parametrize(
    ("text", "descriptors"),
    [
        ("4x8x16", lambda: [*shared(), *shared()]),
        ("4x8x16", lambda: [os.open("/dev/null", os.O_RDONLY)]),
        ("4x8x16", unsealed),
        ("4x8x16", empty),
        ("3x8x16", shared),
        ("4x8", shared),
        ("4x0x16", shared),
        ("-4x8x16", shared),
        ("4x8x99999999", shared),
    ],
)
def test_what_is_no_pool_is_refused(text: str, descriptors: Callable[[], list[int]]) -> None:
    """Nothing of it stays mapped or open."""
    before = len(os.listdir("/proc/self/fd"))
    held = descriptors()
    with pytest.raises(InvalidRequest):
        MappedPools().carrier(text, held)
    for descriptor in held:
        os.close(descriptor)
    assert before == len(os.listdir("/proc/self/fd"))


def test_a_descriptor_that_did_not_arrive_is_no_fault_of_the_sender() -> None:
    """This process may be out of them: another transport may do."""
    with pytest.raises(TransportFailed, match="did not arrive"):
        MappedPools().carrier("4x8x16", [])


def test_what_cannot_be_mapped_goes_another_way(listen: Listen, monkeypatch: pytest.MonkeyPatch) -> None:
    """Within the same call: decode may be short of address space, for a pool is large."""
    book = reservation()
    listening = listen(book)
    source = Pool(SHAPE, num_tokens=10, seed=1)
    handoff = granted(listening.listener.offer("127.0.0.1"))

    def full(*_: object) -> None:
        raise OSError(errno.ENOMEM, "Cannot allocate memory")

    monkeypatch.setattr("shared.kv.transports.shm_reads.mmap.mmap", full)
    with closing(sender_over("shm", "unix", pool=source)) as sender:
        sent = sender.send(Send(handoff, "r1", manifest_for(expected()), source.views(), finished()))
    assert "unix" == sent.transport
    assert source.content() == book.pool.content()
    for _ in range(2):
        listening.next_report()
    # Two connections, so two threads: either may report first.
    assert [(200, "unix"), (502, "unix")] == sorted((r.status, r.transport) for r in listening.reports)


@pytest.mark.parametrize("name", ["shm", "ring", "nixl"])
def test_a_cancel_is_noticed_between_batches(listen: Listen, sender_to: SenderOver, name: str) -> None:
    """Though all of a chunk was told at once, and nothing is waited for."""
    book = reservation(WANT)
    source = Pool(BIG, num_tokens=4096, block_size=16, seed=1)
    copied: list[int] = []
    claim = book.claim

    def cancelling(ticket: Ticket) -> OneClaim:
        taken = claim(ticket)
        copy_in = taken.copy_in

        def copy(tensors: slice, start: int, end: int, content: Rows) -> None:
            copy_in(tensors, start, end, content)
            copied.append(start)
            if len(copied) == 3:
                book.cancel()

        taken.copy_in = copy  # type: ignore[method-assign]
        return taken

    book.claim = cancelling  # type: ignore[method-assign]
    handoff = granted(listen(book).listener.offer("127.0.0.1"))
    send = Send(handoff, "r1", manifest_for(WANT, chunk_size=0), source.views(), finished())
    with closing(sender_to(source)) as sender, pytest.raises(ReservationGone):
        sender.send(send)
    assert 3 == len(copied)


@pytest.mark.parametrize("name", ["shm"])
def test_a_peer_that_still_copies_is_waited_for(listen: Listen, sender_to: SenderOver) -> None:
    """All of a prompt is told at once, and `io_s` is not for copying all of it."""
    book = reservation(WANT)
    source = Pool(BIG, num_tokens=4096, block_size=16, seed=1)
    claim = book.claim

    def slow(ticket: Ticket) -> OneClaim:
        taken = claim(ticket)
        copy_in = taken.copy_in

        def copy(tensors: slice, start: int, end: int, content: Rows) -> None:
            time.sleep(0.005)  # a core that others use as well
            copy_in(tensors, start, end, content)

        taken.copy_in = copy  # type: ignore[method-assign]
        return taken

    book.claim = slow  # type: ignore[method-assign]
    handoff = granted(listen(book).listener.offer("127.0.0.1"))
    send = Send(handoff, "r1", manifest_for(WANT, chunk_size=0), source.views(), finished())
    with closing(sender_to(source, SendTimeouts(io_s=0.1))) as sender:
        sender.send(send)
    assert source.content() == book.pool.content()


def test_what_was_read_counts_for_the_pace() -> None:
    """Within a section a peer may not dawdle: a byte a minute was enough."""
    for body in body_of(b"twelve bytes", step=5):
        section = Section(12)
        assert b"twelve bytes" == read_section(body.receive, 12, section)
        assert 12 == section.taken_bytes


def test_descriptors_do_not_pile_up(listen: Listen) -> None:
    """More than any transport hands over is refused, before a head is complete, and all are closed."""
    listening = listen(reservation())
    memory = SharedMemory(4096)
    offer = listening.listener.offer("127.0.0.1")
    assert offer.kv_socket is not None
    with socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as sock:
        sock.connect(f"\0{offer.kv_socket}")
        for _ in range(3):
            socket.send_fds(sock, [b"P"], [memory.descriptor])
            time.sleep(0.05)  # so that each is received by itself
        assert b"400" in sock.recv(4096)
    assert 400 == listening.next_report().status
    own = os.stat(memory.descriptor).st_ino
    held = 0
    for name in os.listdir("/proc/self/fd"):
        with suppress(OSError):  # that of the listing itself
            held += os.fstat(int(name)).st_ino == own
    assert 2 == held  # the memory's own, and that of its mapping


class Boasting(PoolConnection):
    """Tells of a pool with other blocks than it has."""

    def __init__(self, stream: Stream, pool: Pool, num_blocks: int) -> None:
        super().__init__(stream, pool.memory)
        self._terms = Terms(len(pool.memory.regions), num_blocks, pool.block_size)


@pytest.mark.parametrize("num_blocks", [1, 5, 7])
@pytest.mark.parametrize("name", ["shm"])
def test_a_pool_of_another_shape_is_refused(
    listen: Listen, sender_to: SenderOver, monkeypatch: pytest.MonkeyPatch, num_blocks: int
) -> None:
    """Before anything is read from it."""
    book = reservation()
    source = Pool(SHAPE, num_tokens=10, seed=1)
    before = book.pool.snapshot()
    monkeypatch.setattr(
        "shared.kv.transports.shm.PoolConnection", lambda stream, _: Boasting(stream, source, num_blocks)
    )
    handoff = granted(listen(book).listener.offer("127.0.0.1"))
    progress = Progress()
    progress.finish([1], [False])
    with closing(sender_to(source)) as sender, pytest.raises(ManifestMismatch, match="shape"):
        sender.send(Send(handoff, "r1", manifest_for(expected()), source.views(), progress))
    assert before == book.pool.snapshot()


@pytest.mark.parametrize("name", ["shm"])
def test_a_block_that_the_pool_has_not_is_refused(
    listen: Listen, sender_to: SenderOver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What lies behind the pool is nobody's KV."""
    book = reservation()
    source = Pool(SHAPE, num_tokens=10, seed=1)
    monkeypatch.setattr(BlobEncoder, "blocks", lambda *_: [source.memory.num_blocks] * 3)
    handoff = granted(listen(book).listener.offer("127.0.0.1"))
    progress = Progress()
    progress.finish([1], [False])
    with closing(sender_to(source)) as sender, pytest.raises(ManifestMismatch, match="no such block"):
        sender.send(Send(handoff, "r1", manifest_for(expected()), source.views(), progress))


@pytest.mark.parametrize("name", ["shm", "nixl"])
def test_layers_are_read_while_later_ones_compute(
    listen: Listen, sender_to: SenderOver, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Half of the last chunk's layers are with decode before the other half is computed; all arrive bit for bit."""
    book = reservation(WANT)
    source = Pool(BIG, num_tokens=4096, block_size=16, seed=1)
    content = source.content()
    half = BIG.num_layers // 2
    late = source.memory.regions[half * len(KINDS) :]
    computed = [bytes(region) for region in late]
    for region in late:
        region[:] = bytes(len(region))
    progress = Progress(marks=(half, BIG.num_layers))
    half_read = threading.Event()
    num_read = 0
    digest = ChunkBytes.digest

    def count(chunk: ChunkBytes, *args: object) -> None:
        nonlocal num_read
        digest(chunk, *args)  # type: ignore[arg-type]
        num_read += 1
        half_read.set()

    monkeypatch.setattr(ChunkBytes, "digest", count)
    handoff = granted(listen(book).listener.offer("127.0.0.1"))
    send = Send(handoff, "r1", manifest_for(WANT, chunk_size=4096), source.views(), progress)
    with closing(sender_to(source)) as sender, ThreadPoolExecutor() as threads:
        sending = threads.submit(sender.send, send)
        progress.advance_layers(4096, half)
        assert half_read.wait(WAIT_S)
        for region, layer in zip(late, computed, strict=True):
            region[:] = layer
        progress.advance_layers(4096, BIG.num_layers)
        progress.finish([100], [False])
        assert sending.result(WAIT_S).hidden_s > 0
    assert content == book.pool.content()

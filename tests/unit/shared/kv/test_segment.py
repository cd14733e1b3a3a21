"""Segments: what a receiver refuses to map, and that nothing of one is left or open to others."""

from __future__ import annotations

import fcntl
import os
import stat
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from shared.errors import InvalidRequest
from shared.kv.segment import MAX_SEGMENT_BYTES, Segment, SegmentShape, attach, create
from shared.kv.transports.base import TransportUnavailable
from shared.kv.transports.choice import usable
from shared.kv.transports.shm_ring import RingTransport, SegmentBudget

SHAPE = SegmentShape(num_slots=3, slot_bytes=4096)


@pytest.fixture
def segment() -> Iterator[Segment]:
    """A segment of the test's own."""
    made = create(SHAPE)
    yield made
    made.close()


def duplicates(segment: Segment) -> list[int]:
    """Its descriptors as a peer gets them."""
    return [os.dup(segment.memory_fd), os.dup(segment.emptied_fd)]


def test_reader_sees_what_the_owner_wrote(segment: Segment) -> None:
    """Slots come in turn and again from the front; the reader cannot write."""
    reader = attach(duplicates(segment), SHAPE)
    for position in range(5):
        segment.slot(position)[:4] = bytes([position] * 4)
        assert bytes([position] * 4) == reader.slot(position)[:4]
    assert segment.slot(1)[:1] == segment.slot(4)[:1]
    with pytest.raises(TypeError):
        reader.slot(0)[:1] = b"x"
    reader.close()


def test_a_segment_has_no_name_and_is_its_users_alone(segment: Segment) -> None:
    """It is in no folder, mode 0600, and cannot be shrunk under a reader."""
    facts = os.fstat(segment.memory_fd)
    assert 0 == facts.st_nlink
    assert 0o600 == stat.S_IMODE(facts.st_mode)
    assert facts.st_blocks * 512 >= SHAPE.nbytes
    with pytest.raises(PermissionError):
        os.ftruncate(segment.memory_fd, 0)
    assert not [path for path in Path("/dev/shm").iterdir() if "handoff" in path.name]


def unsealed(_: Segment) -> list[int]:
    """Memory that its owner could take away from under a reader."""
    memory_fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(memory_fd, SHAPE.nbytes)
    return [memory_fd, os.eventfd(0)]


def too_small(_: Segment) -> list[int]:
    """Sealed, but not of the size that the head says."""
    memory_fd = os.memfd_create("test", os.MFD_ALLOW_SEALING)
    os.ftruncate(memory_fd, SHAPE.nbytes - 1)
    fcntl.fcntl(memory_fd, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW | fcntl.F_SEAL_SEAL)
    return [memory_fd, os.eventfd(0)]


@pytest.mark.parametrize(
    "descriptors",
    [
        lambda _: [],
        lambda segment: [os.dup(segment.memory_fd)],
        lambda segment: [*duplicates(segment), os.dup(segment.memory_fd)],
        lambda segment: [os.dup(segment.emptied_fd), os.dup(segment.memory_fd)],
        lambda _: list(os.pipe()),
        unsealed,
        too_small,
    ],
)
def test_what_is_no_segment_is_refused(segment: Segment, descriptors: Callable[[Segment], list[int]]) -> None:
    """Nothing of it stays mapped or open."""
    before = len(os.listdir("/proc/self/fd"))
    with pytest.raises(InvalidRequest):
        attach(descriptors(segment), SHAPE)
    assert before == len(os.listdir("/proc/self/fd"))


@pytest.mark.parametrize(
    "text", ["", "1", "1x", "x1", "0x4096", "1x0", "-1x-1", "1x2x3", f"1x{MAX_SEGMENT_BYTES + 1}"]
)
def test_shapes_that_cannot_be_are_refused(text: str) -> None:
    """A shape is two positive numbers of bounded product."""
    with pytest.raises(InvalidRequest):
        SegmentShape.parse(text)
    assert SHAPE == SegmentShape.parse(str(SHAPE))


def test_too_little_shared_memory_fails_the_self_test() -> None:
    """Such a process neither offers nor uses shared memory; the other transports stay."""
    with pytest.raises(TransportUnavailable, match="less shared memory"):
        RingTransport(SegmentBudget(1024)).self_test()
    assert ["unix", "tcp"] == [
        transport.name for transport in usable("shm,unix,tcp", shm_bytes=1024, secret=b"")
    ]
    assert ["tcp", "shm"] == [transport.name for transport in usable("tcp,shm,tcp", secret=b"")]


def test_a_host_without_memfd_does_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """What the system lacks is found at the start, not at the first hand-off."""
    monkeypatch.delattr(os, "memfd_create")
    assert ["tcp"] == [transport.name for transport in usable("shm,tcp", secret=b"")]

"""Memory for pools: zeros of this process's own, in huge pages where there are some."""

from __future__ import annotations

import mmap
from pathlib import Path

import pytest

from shared.kv.host_memory import own_memory

_HUGE_BYTES = 2 << 20
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def test_it_is_zeros_of_the_right_length() -> None:
    """And can be written."""
    memory = own_memory(3 * mmap.PAGESIZE)
    assert bytes(3 * mmap.PAGESIZE) == memory[:]
    memory[:4] = b"here"
    assert b"here" == memory[:4]


def test_memory_that_cannot_be_had_is_an_error_at_once() -> None:
    """Not when it is touched."""
    with pytest.raises(OSError, match="allocate"):
        own_memory(1 << 50)


@pytest.mark.skipif(
    not _ENABLED.exists() or "[never]" in _ENABLED.read_text(),
    reason="this host has no huge pages for anybody",
)
def test_it_lies_in_huge_pages() -> None:
    """As the kernel says of the mapping."""
    memory = own_memory(8 * _HUGE_BYTES)
    memory[:] = b"\1" * len(memory)
    told = Path("/proc/self/smaps_rollup").read_text()
    huge_kib = next(int(line.split()[1]) for line in told.splitlines() if line.startswith("AnonHugePages:"))
    assert huge_kib * 1024 >= 4 * _HUGE_BYTES

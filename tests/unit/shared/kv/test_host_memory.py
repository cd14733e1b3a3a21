"""Memory for pools: zeros of this process's own, in huge pages where there are some."""

from __future__ import annotations

import ctypes
import mmap
import re
from pathlib import Path

import pytest

from shared.kv.host_memory import own_memory
from shared.kv.pool_memory import address_of

_HUGE_BYTES = 2 << 20
_ENABLED = Path("/sys/kernel/mm/transparent_hugepage/enabled")


def test_it_is_zeros_of_the_right_length() -> None:
    """And can be written."""
    memory = own_memory(3 * mmap.PAGESIZE)
    assert bytes(3 * mmap.PAGESIZE) == memory[:]
    memory[:4] = b"here"
    assert b"here" == memory[:4]


@pytest.mark.parametrize("writable", [True, False])
def test_the_address_of_a_part_is_where_it_lies(writable: bool) -> None:
    """Also of what may only be read; and nothing keeps the memory afterwards."""
    memory = own_memory(2 * mmap.PAGESIZE)
    memory[mmap.PAGESIZE : mmap.PAGESIZE + 4] = b"here"
    with memoryview(memory) as view:
        part = view[mmap.PAGESIZE :]
        address = address_of(part if writable else part.toreadonly())
        assert b"here" == ctypes.string_at(address, 4)
        part.release()
    memory.close()


def test_memory_that_cannot_be_had_is_an_error_at_once() -> None:
    """Not when it is touched."""
    with pytest.raises(OSError, match="allocate"):
        own_memory(1 << 50)


@pytest.mark.skipif(
    not _ENABLED.exists() or "[never]" in _ENABLED.read_text(), reason="there are no huge pages here"
)
def test_it_lies_in_huge_pages() -> None:
    """As the kernel says of this very mapping: it was asked for them, and gave some."""
    num_free = _num_free_huge_pages()
    memory = own_memory(8 * _HUGE_BYTES)
    memory[:] = b"\1" * len(memory)
    told = mapping_at(address_of(memoryview(memory)))
    assert "hg" in told["VmFlags"].split()
    # A host whose memory is in pieces has none to give, and no fault of ours.
    assert int(told["AnonHugePages"].split()[0]) * 1024 >= 4 * _HUGE_BYTES or num_free < 8


def _num_free_huge_pages() -> int:
    """How many the kernel could give at once, larger pieces taken apart, as /proc/buddyinfo says."""
    order = (_HUGE_BYTES // mmap.PAGESIZE).bit_length() - 1
    lines = Path("/proc/buddyinfo").read_text().splitlines()
    return sum(int(count) << more for line in lines for more, count in enumerate(line.split()[4 + order :]))


def mapping_at(address: int) -> dict[str, str]:
    """What /proc/self/smaps says of the mapping that has this address."""
    found: dict[str, str] | None = None
    for line in Path("/proc/self/smaps").read_text().splitlines():
        bounds = re.match(r"([0-9a-f]+)-([0-9a-f]+) ", line)
        if bounds is None and found is not None:
            name, _, value = line.partition(":")
            found[name] = value.strip()
        elif bounds is not None:
            if found is not None:
                return found
            start, end = (int(bound, 16) for bound in bounds.groups())
            found = {} if start <= address < end else None
    assert found is not None
    return found

"""Memory that another process can be let map: an anonymous file (memfd) whose descriptor goes over a Unix socket.

It has no name: nothing of it is left when the last process that has it is gone. Mode 0600, and sealed: nobody can
shrink it under a reader, who would die of that.
"""

from __future__ import annotations

import fcntl
import mmap
import os
import weakref

from shared.errors import InvalidRequest
from shared.kv.host_memory import ask_for_huge_pages

_SIZE_SEALS = ("F_SEAL_SEAL", "F_SEAL_SHRINK", "F_SEAL_GROW")
_SEAL_FUTURE_WRITE = 0x10  # Linux 5.1; the fcntl module of Python 3.11 does not name it


class SharedMemory:
    """num_bytes that this process alone can write. Raises OSError; AttributeError where there is no memfd.

    Pages are taken as they are touched. The descriptor is closed with this object, the memory with the last view.
    """

    def __init__(self, num_bytes: int) -> None:
        # NOTE: the file itself may be of any size. Memory that can never be had is refused here, not when touched.
        mmap.mmap(-1, num_bytes).close()
        self.descriptor = sealed_file("handoff-pool", num_bytes)
        weakref.finalize(self, os.close, self.descriptor)
        self.content = mmap.mmap(self.descriptor, num_bytes)
        ask_for_huge_pages(self.content)
        fcntl.fcntl(self.descriptor, fcntl.F_ADD_SEALS, _size_seals() | _SEAL_FUTURE_WRITE)


def sealed_file(name: str, num_bytes: int) -> int:
    """An anonymous file of this size, which it keeps; more seals can be added until it has F_SEAL_SEAL.

    Raises OSError; AttributeError where there is no memfd.
    """
    descriptor = os.memfd_create(name, os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING)
    try:
        os.fchmod(descriptor, 0o600)
        os.ftruncate(descriptor, num_bytes)
        fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, fcntl.F_SEAL_SHRINK | fcntl.F_SEAL_GROW)
    except BaseException:
        os.close(descriptor)
        raise
    return descriptor


def seal(descriptor: int) -> None:
    """No more seals can be added, as `check_sealed` wants it. Raises OSError."""
    fcntl.fcntl(descriptor, fcntl.F_ADD_SEALS, _size_seals())


def check_sealed(descriptor: int) -> None:
    """Raise InvalidRequest for what is no memory, or could be taken away while it is read."""
    try:
        seals = fcntl.fcntl(descriptor, fcntl.F_GET_SEALS)
    except OSError as exc:
        raise InvalidRequest("what came along is no shared memory") from exc
    if seals & _size_seals() != _size_seals():
        raise InvalidRequest("the shared memory is not sealed")


def _size_seals() -> int:
    return sum(getattr(fcntl, name) for name in _SIZE_SEALS)

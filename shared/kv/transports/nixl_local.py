"""Whether UCX reads a peer's memory by a call of the kernel (process_vm_readv) that has ended when it returns.

Only then may a read go to where the bytes belong. Timing cannot tell: a read over a network ends at once now and
then. So all that UCX needs for it is asked for: the same host and pid namespace, the rights, and its own settings.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from pathlib import Path

_SETTING = "UCX_TLS"
_NAMES = frozenset({"all", "cma", "sm", "shm"})
_PTRACE_SCOPE = Path("/proc/sys/kernel/yama/ptrace_scope")
_OWN_STATUS = Path("/proc/self/status")
_CAP_SYS_PTRACE = 19
_NOBODY_MAY = 3


def pid_namespace() -> int:
    """A number for this process's pid namespace; 0 if it cannot be known."""
    try:
        return os.stat("/proc/self/ns/pid").st_ino
    except OSError:
        return 0


def kernel_copies() -> bool:
    """Whether UCX would use the call in this process, for a peer that it may reach so."""
    return _is_wanted(os.environ) and _may_trace() and _works()


def _is_wanted(environment: Mapping[str, str]) -> bool:
    """What the setting of UCX allows. `^a,b` is all but these."""
    setting = environment.get(_SETTING, "").strip()
    names = {name.strip().partition(":")[0] for name in setting.removeprefix("^").split(",")}
    if setting.startswith("^"):
        return not names & _NAMES
    return not setting or bool(names & _NAMES)


def _may_trace() -> bool:
    """Whether Linux' Yama lets a process read another one of its user that is not its child."""
    try:
        scope = int(_PTRACE_SCOPE.read_text())
    except (OSError, ValueError):
        return not _PTRACE_SCOPE.exists()
    return not scope or (scope < _NOBODY_MAY and _has_capability())


def _has_capability() -> bool:
    lines = _OWN_STATUS.read_text().splitlines()
    effective = next(int(line.split()[1], 16) for line in lines if line.startswith("CapEff:"))
    return bool(effective >> _CAP_SYS_PTRACE & 1)


class _Piece(ctypes.Structure):
    """struct iovec."""

    _fields_ = (("base", ctypes.c_void_p), ("length", ctypes.c_size_t))


def _works() -> bool:
    """Whether the call exists and no filter forbids it: this process reads itself."""
    try:
        read = ctypes.CDLL(None, use_errno=True).process_vm_readv
    except (OSError, AttributeError):
        return False
    content, copy = ctypes.create_string_buffer(b"seen", 4), ctypes.create_string_buffer(4)
    local, remote = (_Piece(ctypes.addressof(memory), 4) for memory in (copy, content))
    read.restype = ctypes.c_ssize_t
    arguments = (ctypes.byref(local), ctypes.c_ulong(1), ctypes.byref(remote), ctypes.c_ulong(1))
    return bool(read(os.getpid(), *arguments, ctypes.c_ulong(0)) == 4 and copy.raw == b"seen")

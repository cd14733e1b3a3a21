"""What a worker's host gives it: cores, descriptors, memory, and how fast it copies and digests there."""

from __future__ import annotations

import os
import resource
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median

import numpy as np
from xxhash import xxh3_64_intdigest

from shared.kv.copy_rows import Place, compiled, moves_between
from shared.kv.pool_memory import Rows
from shared.kv.transports.unix import host_id
from shared.wire import Role
from shared.wire_probe import HostReport
from shared.worker.settings import WorkerSettings

# Larger than most cores' own caches, as KV is; small enough to take milliseconds.
_BUFFER_BYTES = 8 << 20
_RUNS = 5


def report_host(role: Role, settings: WorkerSettings, *, pool_is_shared: bool) -> HostReport:
    """Blocks for some ten milliseconds; takes 16 MiB meanwhile. Call it beside the event loop, one at a time.

    pool_is_shared: peers map the KV pool, so nothing is spent on segments.
    """
    began = time.monotonic()
    source = np.frombuffer(os.urandom(1 << 16) * (_BUFFER_BYTES >> 16), np.uint8)
    target = np.empty_like(source)
    copied_s = _median_s(lambda: np.copyto(target, source))
    digested_s = _median_s(lambda: xxh3_64_intdigest(source.data))
    both_s = _in_one_pass_s(source, target)
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return HostReport(
        role=role,
        host_id=host_id(),
        cpus=sorted(os.sched_getaffinity(0)),
        chunk_size=settings.chunk_size,
        max_num_seqs=settings.max_num_seqs,
        open_files=len(os.listdir("/proc/self/fd")),
        max_open_files=soft if soft != resource.RLIM_INFINITY else 1 << 30,
        available_memory_bytes=_available_memory_bytes(),
        shm_bytes=None if pool_is_shared else settings.shm_budget_bytes,
        copy_bytes_per_s=_BUFFER_BYTES / copied_s,
        digest_bytes_per_s=_BUFFER_BYTES / digested_s,
        both_bytes_per_s=None if both_s is None else _BUFFER_BYTES / both_s,
        measured_s=time.monotonic() - began,
        monotonic_s=time.monotonic(),
        wall_s=time.time(),
    )


def _in_one_pass_s(source: Rows, target: Rows) -> float | None:
    """As KV is copied from another process's pool."""
    copy_rows, moves = compiled(), moves_between([(0, _BUFFER_BYTES)], [(0, _BUFFER_BYTES)])
    if copy_rows is None or moves is None:
        return None
    origin, end = (Place(rows.ctypes.data, 1, _BUFFER_BYTES) for rows in (source, target))
    return _median_s(lambda: copy_rows(origin, end, 1, moves, store_past=True, load_past=True))


def _median_s(act: Callable[[], object]) -> float:
    times = []
    for _ in range(_RUNS):
        began = time.perf_counter()
        act()
        times.append(time.perf_counter() - began)
    return max(median(times), 1e-9)


def _available_memory_bytes() -> int:
    """What the kernel says can be had without swapping; a container's own limit counts too."""
    facts = dict(line.split(":", 1) for line in Path("/proc/meminfo").read_text().splitlines())
    free = int(facts["MemAvailable"].split()[0]) * 1024
    group = Path("/sys/fs/cgroup")
    try:
        limit = int((group / "memory.max").read_text())
        return min(free, max(0, limit - int((group / "memory.current").read_text())))
    except (OSError, ValueError):  # no such group, or "max"
        return free

"""What can be said of two workers before anything is timed: do they fit, and do their hosts give them enough?"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Literal

from shared.kv.shape import KV_DTYPES
from shared.wire import PROTOCOL_VERSION, WorkerInfo
from shared.wire_probe import HostReport

Level = Literal["ok", "note", "problem"]

SPARE_FILES = 64
SPARE_MEMORY_BYTES = 256 << 20
CLOCK_RATE_LIMIT = 0.01
WALL_LIMIT_S = 1.0
SEGMENT_BYTES = 4 << 20
"""Of the shared memory of one connection (docs/transfer.md)."""


@dataclass(frozen=True)
class Finding:
    """One fact, and whether it is as it should be. A note is no fault, but somebody may want to know."""

    what: str
    level: Level
    text: str


@dataclass(frozen=True)
class Clock:
    """A worker's clocks against ours, each with how far off the measurement can be.

    rate: its seconds per second of ours. ahead_s: of its wall clock.
    """

    rate: float
    rate_error: float
    ahead_s: float
    error_s: float


@dataclass(frozen=True)
class Seen:
    """One worker as it was found."""

    info: WorkerInfo
    host: HostReport
    clock: Clock


def check_pair(prefill: WorkerInfo, decode: WorkerInfo) -> Iterator[Finding]:
    """Roles, protocol, readiness, fingerprints. A problem here makes every measurement pointless."""
    for wanted, info in (("prefill", prefill), ("decode", decode)):
        if info.role != wanted:
            yield Finding("role", "problem", f"{info.name} is a {info.role} worker, not a {wanted} worker")
        if info.protocol != PROTOCOL_VERSION:
            yield Finding("protocol", "problem", f"{info.name} speaks protocol {info.protocol}")
        if not info.ready:
            yield Finding("ready", "problem", f"{info.name} takes no work now")
        elif info.load:
            yield Finding(
                "load", "note", f"{info.name} is serving {info.load} requests: times are of a busy worker"
            )
    differing = prefill.fingerprint.differences(decode.fingerprint)
    if differing:
        yield Finding(
            "fingerprint", "problem", f"the workers differ in {', '.join(differing)}: no KV fits both"
        )
    elif prefill.fingerprint.dtype not in KV_DTYPES:
        yield Finding(
            "fingerprint", "problem", f"KV of {prefill.fingerprint.dtype}: this version does not know it"
        )
    else:
        digest = prefill.fingerprint.digest
        yield Finding(
            "fingerprint", "ok", f"equal ({digest[:8]}): {prefill.model}, {prefill.fingerprint.dtype}"
        )


def check_hosts(prefill: Seen, decode: Seen) -> Iterator[Finding]:
    """Clocks, cores, descriptors, memory, shared memory."""
    same_host = prefill.host.host_id is not None and prefill.host.host_id == decode.host.host_id
    yield Finding(
        "hosts", "ok", "one host" if same_host else "two hosts (or two network namespaces): KV goes over TCP"
    )
    for seen in (prefill, decode):
        yield _clock(seen)
        yield from _limits(seen)
    if abs(prefill.clock.ahead_s - decode.clock.ahead_s) > WALL_LIMIT_S:
        apart = abs(prefill.clock.ahead_s - decode.clock.ahead_s)
        text = f"wall clocks are {apart:.1f} s apart: logs of the two do not sort; nothing else uses them"
        yield Finding("clocks", "note", text)
    shared_cores = set(prefill.host.cpus) & set(decode.host.cpus)
    if same_host and shared_cores and prefill.info.fingerprint.dtype == "float32":
        text = f"both compute on cores {_some(shared_cores)}: keep them apart with HANDOFF_CPUS"
        yield Finding("cores", "note", text)
    budget_bytes = prefill.host.shm_bytes
    if same_host and budget_bytes is not None and budget_bytes < SEGMENT_BYTES:
        yield Finding(
            "shm", "note", "HANDOFF_KV_SHM_BYTES has no room for a single transfer: shm is not used"
        )


def _clock(seen: Seen) -> Finding:
    clock, name = seen.clock, seen.info.name
    if abs(clock.rate - 1) > CLOCK_RATE_LIMIT + clock.rate_error:
        text = f"{name}'s clock runs {clock.rate:.3f} times as fast as ours: its durations are wrong"
        return Finding("clocks", "problem", text)
    ahead = f"wall clock {clock.ahead_s * 1e3:+.1f} ms (± {clock.error_s * 1e3:.1f} ms)"
    return Finding("clocks", "ok", f"{name}: durations agree with ours; {ahead}")


def _limits(seen: Seen) -> Iterator[Finding]:
    host, name = seen.host, seen.info.name
    left = host.max_open_files - host.open_files
    text = f"{name}: {left:,} of {host.max_open_files:,} file descriptors are free"
    # Each hand-off can take a connection, a segment's descriptors, and the request's own connection.
    level: Level = "ok" if left >= SPARE_FILES else "problem"
    yield Finding("descriptors", level, text if level == "ok" else f"{text}: raise `ulimit -n`")
    free = host.available_memory_bytes
    text = f"{name}: {free / 2**30:.1f} GiB of memory are free"
    yield Finding("memory", "ok" if free >= SPARE_MEMORY_BYTES else "problem", text)
    capacity = seen.info.num_blocks * seen.info.block_size
    text = f"{name}: the KV pool holds {capacity:,} tokens, a request may have {seen.info.max_model_len:,}"
    yield Finding("pool", "ok" if capacity >= 2 * seen.info.max_model_len else "note", text)


def _some(cores: set[int]) -> str:
    first = ", ".join(map(str, sorted(cores)[:8]))
    return first if len(cores) <= 8 else f"{first}, ..."

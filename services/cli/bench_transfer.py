"""`handoff bench transfer`: how long KV travels between two processes of this host, beside what bounds it.

Over each transport in three ways: from the call to the sender's answer; "opened": from KV that is there, as in a
request; "injected": the same to when decode may use the KV.

All ways take turns, so that what else the host does hits all of them alike. The first run of a turn does not count:
it finds in the caches what another way has left there. Only the NIXL library as it comes runs after the others: its
threads, which never sleep, would disturb them.
"""

from __future__ import annotations

import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from rich.console import Console
from rich.table import Table

from loadtest.report import show
from services.cli.transfer_kv import SHAPE, Setup, Way, injected, opened
from services.cli.transfer_nixl import reading_as_it_comes
from services.cli.transfer_ways import (
    BARE_NIXL,
    MEMCPY,
    NIXL_AS_IT_COMES,
    QUEUE,
    RAW_TCP,
    nixl_way,
    ways,
)
from shared.kv.transports.base import TransportUnavailable
from shared.kv.transports.choice import NAMES

SIZES_MIB = (1.0, 3.5, 28.0, 112.0)
_MIB = 1 << 20
_SLOW_BYTES = 64 * _MIB
_FEW = 3
_RUNS_A_TURN = 5
_COPIES = 12  # of the largest size that both processes hold together, all ways counted


def parse_sizes(text: str) -> tuple[float, ...]:
    """Sizes in MiB, split by commas. Raises ValueError, also for what this host has no memory for."""
    sizes = []
    most_mib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / _MIB / _COPIES
    for part in text.split(","):
        try:
            size_mib = float(part)
        except ValueError as exc:
            raise ValueError(f"no size in MiB: {part!r}") from exc
        if not math.isfinite(size_mib) or size_mib <= 0:
            raise ValueError(f"a size must be finite and above 0: {part!r}")
        if size_mib > most_mib:
            raise ValueError(f"this host has memory for at most {most_mib:.0f} MiB: {part!r}")
        sizes.append(size_mib)
    return tuple(sizes)


def parse_transports(text: str) -> tuple[str, ...]:
    """Names of transports, split by commas. Raises ValueError."""
    names = tuple(name.strip() for name in text.split(","))
    for name in names:
        if name not in NAMES:
            raise ValueError(f"no transport {name!r}: there are {', '.join(NAMES)}")
    return names


@dataclass(frozen=True)
class Plan:
    """What is measured. runs: of every way at every size; a third of it above 64 MiB, and for the queue."""

    sizes_mib: Sequence[float] = SIZES_MIB
    runs: int = 30

    def tokens(self, size_mib: float) -> int:
        """The prompt whose KV has about this size."""
        return max(1, round(size_mib * _MIB / SHAPE.bytes_per_token))

    def runs_of(self, way: str, size_mib: float) -> int:
        """How often a way is measured."""
        few = way == QUEUE or size_mib * _MIB > _SLOW_BYTES
        return max(3, self.runs // _FEW) if few else self.runs


@dataclass
class Result:
    """seconds[size][way]: every measured run. missing: ways that do not work here, and why."""

    plan: Plan
    seconds: dict[float, dict[str, list[float]]] = field(default_factory=dict)
    missing: dict[str, str] = field(default_factory=dict)

    def p50_ms(self, size_mib: float, way: str) -> float:
        """Median."""
        return median(self.seconds[size_mib][way]) * 1e3

    def p99_ms(self, size_mib: float, way: str) -> float:
        """Nearest rank; with fewer than 100 runs it is the slowest one."""
        ordered = sorted(self.seconds[size_mib][way])
        return ordered[-(-99 * len(ordered) // 100) - 1] * 1e3

    def gb_per_s(self, size_mib: float, way: str) -> float:
        """Bytes of KV per second at the median."""
        return self.plan.tokens(size_mib) * SHAPE.bytes_per_token / self.p50_ms(size_mib, way) / 1e6

    @property
    def goals(self) -> dict[str, bool]:
        """Which of the stated goals were measured, and whether they are met."""
        goals: dict[str, bool] = {}

        def goal(text: str, size_mib: float, way: str, limit_ms: float | tuple[str, float]) -> None:
            measured = self.seconds.get(size_mib, {})
            if way not in measured:
                return
            if isinstance(limit_ms, tuple):
                other, factor = limit_ms
                if other not in measured:
                    return
                limit_ms = self.p50_ms(size_mib, other) * factor
            value_ms = self.p50_ms(size_mib, way)
            goals[f"{way} {size_mib:g} MiB {text}: {value_ms:.2f} of {limit_ms:.2f} ms"] = (
                value_ms <= limit_ms
            )

        for way in ("shm", opened("shm"), injected("shm")):
            goal("under 1 ms", 3.5, way, 1.0)
        goal("at 60 % of the speed of two memcpys", 28.0, "shm", (MEMCPY, 1 / 0.6))
        goal("under 4 ms", 3.5, "tcp", 4.0)
        for size_mib in (28.0, 112.0):
            goal("at 60 % of raw TCP", size_mib, "tcp", (RAW_TCP, 1 / 0.6))
            for alone in (NIXL_AS_IT_COMES, BARE_NIXL):
                goal(f"within 1.3 times {alone}", size_mib, "nixl", (alone, 1.3))
        for way in NAMES:
            if way in self.seconds.get(28.0, {}):
                goal("4 times faster than pickle + Queue", 28.0, way, (QUEUE, 0.25))
        return goals

    def to_dict(self) -> dict[str, object]:
        """For machines."""
        return {
            "sizes": {
                f"{size:g}": {
                    way: {
                        "p50_ms": self.p50_ms(size, way),
                        "p99_ms": self.p99_ms(size, way),
                        "gb_per_s": self.gb_per_s(size, way),
                        "runs": len(times),
                    }
                    for way, times in by_way.items()
                }
                for size, by_way in self.seconds.items()
            },
            "goals": self.goals,
            "missing": self.missing,
        }


def measure_transfer(
    plan: Plan, cores: Sequence[int], transports: Sequence[str], *, scattered: bool
) -> Result:
    """Run the plan. The sender keeps to the first core, the receiver to the last."""
    setup = Setup(
        max_tokens=max(map(plan.tokens, plan.sizes_mib)),
        cores=(cores[0], cores[-1]),
        scattered=scattered,
        transports=tuple(transports),
    )
    result = Result(plan)
    with ways(setup) as by_name:
        for size_mib in plan.sizes_mib:
            result.seconds[size_mib] = _take_turns(plan, size_mib, by_name)
        has_nixl = BARE_NIXL in by_name
        for name in transports:
            if name not in by_name:
                result.missing[name] = "it does not work here; the log says why"
    if has_nixl:
        try:
            _add_nixl_as_it_comes(result, setup)
        except (TransportUnavailable, EOFError, OSError) as exc:
            result.missing[NIXL_AS_IT_COMES] = str(exc) or "its process ended"
    return result


def _add_nixl_as_it_comes(result: Result, setup: Setup) -> None:
    plan = result.plan
    with reading_as_it_comes(setup.max_tokens * SHAPE.bytes_per_token) as be_read:
        way = {NIXL_AS_IT_COMES: nixl_way(be_read)}
        rows = {size_mib: _take_turns(plan, size_mib, way) for size_mib in plan.sizes_mib}
    for size_mib, row in rows.items():
        result.seconds[size_mib] |= row


def _take_turns(plan: Plan, size_mib: float, by_name: Mapping[str, Way]) -> dict[str, list[float]]:
    num_tokens = plan.tokens(size_mib)
    seconds: dict[str, list[float]] = {name: [] for name in by_name}
    while any(len(seconds[name]) < plan.runs_of(name, size_mib) for name in by_name):
        for name, way in by_name.items():
            left = plan.runs_of(name, size_mib) - len(seconds[name])
            if left > 0:
                way(num_tokens)
                seconds[name] += [way(num_tokens) for _ in range(min(left, _RUNS_A_TURN))]
    return seconds


def print_transfer(console: Console, result: Result) -> None:
    """The table and the goals."""
    table = Table()
    table.add_column("way")
    for size_mib in result.seconds:
        table.add_column(f"{size_mib:g} MiB", justify="right")
    names = list(next(iter(result.seconds.values())))
    for way in names:
        table.add_row(way, *(_cell(result, size_mib, way) for size_mib in result.seconds))
    show(
        console,
        "p50 / p99 ms (GB/s at p50): from the call to the answer (opened: from the KV; injected: and to its use)",
        table,
    )
    for way, why in result.missing.items():
        console.print(f"{way}: not measured: {why}", highlight=False)
    for goal, met in result.goals.items():
        console.print(f"goal: {goal}: {'met' if met else 'missed'}", highlight=False)


def _cell(result: Result, size_mib: float, way: str) -> str:
    p50, p99 = result.p50_ms(size_mib, way), result.p99_ms(size_mib, way)
    return f"{p50:.2f} / {p99:.2f} ({result.gb_per_s(size_mib, way):.2f})"

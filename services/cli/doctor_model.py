"""Does splitting pay? Pure arithmetic over what was measured; docs/doctor.md explains the formulas.

Compared is equal hardware: one prefill and one decode worker against two workers that each do both. Either way
`running` answers are decoded at a time in all, so each of those two has half of them.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass


@dataclass(frozen=True)
class Line:
    """y(x) through measured points, straight between and beyond them; never below 0. points: (x, y) by rising x."""

    points: tuple[tuple[float, float], ...]

    def at(self, x: float) -> float:
        """The value at x; with one point, in proportion to it."""
        if len(self.points) == 1:
            [(x0, y0)] = self.points
            return y0 * x / x0
        index = min(max(1, bisect_left(self.points, (x,))), len(self.points) - 1)
        (x0, y0), (x1, y1) = self.points[index - 1 : index + 1]
        return max(0.0, y0 + (y1 - y0) * (x - x0) / (x1 - x0))


def line(points: Sequence[tuple[float, float]]) -> Line:
    """Sorted, and repaired by what noise breaks: a longer one never takes less time."""
    rising: list[tuple[float, float]] = []
    for x, y in sorted(points):
        if rising and rising[-1][0] == x:
            continue
        rising.append((x, max(y, rising[-1][1] if rising else 0.0)))
    return Line(tuple(rising))


@dataclass(frozen=True)
class Link:
    """One transport: a hand-off of `b` bytes takes fixed_s + b / bytes_per_s."""

    fixed_s: float
    bytes_per_s: float

    @classmethod
    def through(cls, points: Sequence[tuple[int, float]]) -> Link:
        """From the smallest and the largest hand-off. points: (bytes, seconds) of two or more sizes.

        If noise made the largest no slower, it is taken for what it shows: at least this bandwidth.
        """
        (small, small_s), *_, (large, large_s) = sorted(points)
        if large_s <= small_s:
            return cls(fixed_s=large_s, bytes_per_s=large / max(large_s, 1e-9))
        per_byte = (large_s - small_s) / (large - small)
        return cls(fixed_s=max(0.0, small_s - small * per_byte), bytes_per_s=1 / per_byte)


@dataclass(frozen=True)
class Measured:
    """What the workers showed.

    local_s, remote_s: seconds to compute a prompt, by its tokens, at decode and at prefill. step_s: seconds of a
    decode step, by the number of answers in it. reserve_s: asking decode for a reservation and being granted it.
    """

    local_s: Line
    remote_s: Line
    step_s: Line
    reserve_s: float
    link: Link
    bytes_per_token: int
    chunk_size: int


@dataclass(frozen=True)
class Load:
    """The prompt mix: answers of `output_tokens`, `running` of them at a time."""

    output_tokens: int
    running: int


@dataclass(frozen=True)
class Costs:
    """Of one prompt, in seconds.

    exposed_s: transfer that nothing hides. split_s: what splitting adds to its request. stall_s: how long computing
    it stops each answer on a worker that does both, in pauses of at most `pause_s`. unified_s: that of all of them.
    """

    prompt_tokens: int
    exposed_s: float
    split_s: float
    stall_s: float
    pause_s: float
    unified_s: float

    @property
    def pays(self) -> bool:
        """Whether splitting costs less."""
        return self.split_s < self.unified_s


def exposed_s(measured: Measured, num_tokens: int) -> float:
    """What is left to wait for when the prompt is computed: chunks travel while later ones are computed."""
    size = measured.chunk_size or num_tokens
    computed = sent = 0.0
    for start in range(0, num_tokens, size):
        end = min(start + size, num_tokens)
        computed = measured.remote_s.at(end)
        sent = max(sent, computed) + (end - start) * measured.bytes_per_token / measured.link.bytes_per_s
    return measured.link.fixed_s + sent - computed


def costs(measured: Measured, load: Load, num_tokens: int) -> Costs:
    """Both ways for a prompt of this length."""
    together, apart = measured.step_s.at(load.running), measured.step_s.at(max(1.0, load.running / 2))
    exposed = exposed_s(measured, num_tokens)
    stall = measured.local_s.at(num_tokens)
    chunk = min(measured.chunk_size or num_tokens, num_tokens)
    return Costs(
        prompt_tokens=num_tokens,
        exposed_s=exposed,
        split_s=measured.reserve_s + exposed + (load.output_tokens - 1) * max(0.0, together - apart),
        stall_s=stall,
        pause_s=max(measured.local_s.at(chunk), stall - measured.local_s.at(num_tokens - chunk)),
        unified_s=stall * load.running / 2,
    )


def break_even(measured: Measured, load: Load, longest: int) -> int | None:
    """The shortest prompt from which on splitting pays; None if it pays for no length up to `longest`."""
    low, high = 0, 1
    while not costs(measured, load, high).pays:
        if high == longest:
            return None
        low, high = high, min(high * 2, longest)
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if costs(measured, load, middle).pays else (middle, high)
    return high


def requests_per_s(measured: Measured, load: Load, num_tokens: int) -> tuple[float, float]:
    """Most requests that (split, two unified workers) can serve, by compute alone."""
    per_answer = load.output_tokens - 1
    half = max(1.0, load.running / 2)
    decode_s = per_answer * measured.step_s.at(load.running) / load.running
    both_s = measured.local_s.at(num_tokens) + per_answer * measured.step_s.at(half) / half
    slower_s = max(measured.remote_s.at(num_tokens), decode_s)
    return 1 / max(slower_s, 1e-9), 2 / max(both_s, 1e-9)

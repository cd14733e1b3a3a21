"""Keeps a set of child processes running until it is told to stop, and leaves none behind.

A child that ends before it was ever ready fails the whole start: it would fail again. One that ends later is
restarted after a short pause, a few times a minute; more often than that is a fault to be seen, not hidden.
"""

from __future__ import annotations

import asyncio
import os
import signal
import time
from collections import deque
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from services.cli.child import Child, Echo
from services.cli.log_lines import readable, summary
from services.cli.plan import ChildSpec
from services.cli.progress import Display

IsReady = Callable[[str], Awaitable[bool]]


@dataclass(frozen=True)
class Policy:
    """Times in seconds. stop_s: what a child gets between SIGTERM and SIGKILL."""

    max_restarts: int = 3
    restart_window_s: float = 60.0
    restart_pause_s: float = 0.5
    ready_interval_s: float = 0.1
    stop_s: float = 40.0


class ChildFailed(Exception):
    """A child ended and is not restarted. lines: its last output."""

    def __init__(self, name: str, status: int, lines: list[str]) -> None:
        how = f"was killed by {signal.Signals(-status).name}" if status < 0 else f"ended with status {status}"
        super().__init__(f"{name} {how}")
        self.lines = lines


class Restarts:
    """When one child was restarted, and whether it may be once more."""

    def __init__(self, policy: Policy) -> None:
        self._policy = policy
        self._times: deque[float] = deque()

    def next_pause_s(self, now: float) -> float | None:
        """Seconds to wait before the restart that is needed at `now`, doubled each time; None: no more."""
        while self._times and self._times[0] <= now - self._policy.restart_window_s:
            self._times.popleft()
        if len(self._times) >= self._policy.max_restarts:
            return None
        self._times.append(now)
        return float(self._policy.restart_pause_s * 2 ** (len(self._times) - 1))


class Stop:
    """How the outside ends a run: asked once, children finish their work; asked again, they are killed."""

    def __init__(self) -> None:
        self.asked = asyncio.Event()
        self.at_once = asyncio.Event()

    def ask(self) -> None:
        """Signal handler."""
        (self.at_once if self.asked.is_set() else self.asked).set()


class Supervisor:
    """Runs `specs`, the last of which is the front that is stopped first, so that it can drain."""

    def __init__(
        self,
        specs: Sequence[ChildSpec],
        logs: Path,
        *,
        display: Display,
        is_ready: IsReady,
        policy: Policy | None = None,
        echo: Echo | None = None,
    ) -> None:
        self._display = display
        self._is_ready = is_ready
        self._policy = policy or Policy()
        self._lifeline = os.pipe()
        self._children = [
            Child(spec, logs / f"{spec.name}.log", lifeline_fd=self._lifeline[0], echo=echo) for spec in specs
        ]
        self._was_ready = {child.spec.name: asyncio.Event() for child in self._children}

    async def run(self, stop: Stop, on_ready: Callable[[], Awaitable[None]]) -> None:
        """Start all, await `on_ready` when all are ready, return after `stop`. No child is left in any case.

        Raises ChildFailed.
        """
        keepers = [asyncio.create_task(self._keep(child)) for child in self._children]
        stopper = asyncio.create_task(stop.asked.wait())
        started = asyncio.create_task(self._announce(on_ready))
        waiting: set[asyncio.Task[Any]] = {*keepers, stopper, started}
        try:
            while not stopper.done():
                done, waiting = await asyncio.wait(waiting, return_when=asyncio.FIRST_COMPLETED)
                for task in done:
                    task.result()
        finally:
            await _cancel([*keepers, stopper, started])
            await self._stop_all(stop)
            for end in self._lifeline:
                os.close(end)

    async def _announce(self, on_ready: Callable[[], Awaitable[None]]) -> None:
        for event in self._was_ready.values():
            await event.wait()
        await on_ready()

    async def _keep(self, child: Child) -> None:
        """Run one child for as long as it may be restarted. Raises ChildFailed."""
        name = child.spec.name
        restarts = Restarts(self._policy)
        self._display.update(name, "starting")
        while True:
            await child.start()
            watcher = asyncio.create_task(self._watch_start(child))
            try:
                status = await child.wait()
            finally:
                await _cancel([watcher])
            pause_s = restarts.next_pause_s(time.monotonic()) if self._was_ready[name].is_set() else None
            failure = ChildFailed(name, status, [readable(line) for line in child.tail(20)])
            if pause_s is None:
                self._display.update(name, "failed", str(failure))
                raise failure
            self._display.update(name, "restarting", str(failure))
            await asyncio.sleep(pause_s)

    async def _watch_start(self, child: Child) -> None:
        """Show what a child logs until it is ready."""
        while not await self._is_ready(child.spec.ready_url):
            self._display.update(child.spec.name, "starting", "".join(map(summary, child.tail(1)))[:100])
            await asyncio.sleep(self._policy.ready_interval_s)
        self._display.update(child.spec.name, "ready")
        self._was_ready[child.spec.name].set()

    async def _stop_all(self, stop: Stop) -> None:
        """Front first, then the workers behind it, each within its time."""
        *workers, front = self._children
        for group in ([front], workers):
            running = [child for child in group if child.running]
            if not running:
                continue
            for child in running:
                child.terminate()
            for child in running:
                self._display.update(child.spec.name, "stopping")
            await self._wait_or_kill(running, stop)
            for child in running:
                self._display.update(child.spec.name, "stopped")

    async def _wait_or_kill(self, children: Sequence[Child], stop: Stop) -> None:
        all_ended = asyncio.gather(*(child.wait() for child in children))
        hurry = asyncio.create_task(stop.at_once.wait())
        either: set[asyncio.Future[Any]] = {all_ended, hurry}
        await asyncio.wait(either, timeout=self._policy.stop_s, return_when=asyncio.FIRST_COMPLETED)
        for child in children:
            child.kill()
        await all_ended
        await _cancel([hurry])


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    """Cancel and wait; whatever they still had to say was said before or does not matter any more."""
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)

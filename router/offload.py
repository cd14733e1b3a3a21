"""Where requests are read and turned into tokens: short ones on the event loop, one a turn; long ones in threads.

Whatever takes long never holds up what does not: very long texts have threads of their own, so they wait for each
other only; and of many short requests that come at once, each lets everything else have its turn before the next.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import TypeVar

from router.settings import RouterSettings
from shared.errors import Overloaded

T = TypeVar("T")
VERY_LONG = 16
"""Times `offload_chars`."""


class Offload:
    """Bounded in threads and in what waits for them. Used from one event loop."""

    def __init__(self, settings: RouterSettings) -> None:
        self._settings = settings
        self._turn = asyncio.Lock()
        self._num_in_threads = 0
        self._threads = _Threads(settings.text_threads, "text")
        self._long_threads = _Threads(settings.text_threads, "long-text")

    def is_long(self, size: int) -> bool:
        """Whether work on so many bytes belongs into a thread."""
        return size > self._settings.offload_chars

    async def here(self, work: Callable[[], T]) -> T:
        """`work()` on the event loop; the next one has its turn after whatever else is ready by now."""
        await self._turn.acquire()
        try:
            return work()
        finally:
            asyncio.get_running_loop().call_soon(self._turn.release)

    async def in_thread(self, size: int, work: Callable[[], T]) -> T:
        """`work()` in a thread for texts of `size` bytes. A cancelled caller takes it back while it waits.

        Raises Overloaded if too much waits already.
        """
        if self._num_in_threads >= 2 * self._settings.text_threads + self._settings.max_text_queued:
            raise Overloaded(
                "too many long requests wait to be read", retry_after_s=self._settings.retry_after_s
            )
        is_very_long = size > VERY_LONG * self._settings.offload_chars
        threads = self._long_threads if is_very_long else self._threads
        self._num_in_threads += 1
        try:
            return await threads.run(work)
        finally:
            self._num_in_threads -= 1

    def close(self) -> None:
        """Take no more; what runs ends by itself."""
        for threads in (self._threads, self._long_threads):
            threads.close()


class _Threads:
    """Work waits outside the executor, whose queue would keep what was taken back, bodies and all."""

    def __init__(self, number: int, name: str) -> None:
        self._executor = ThreadPoolExecutor(number, thread_name_prefix=name)
        self._free = asyncio.Semaphore(number)

    async def run(self, work: Callable[[], T]) -> T:
        """What is running when the caller is cancelled runs on, and keeps its thread until it is through."""
        await self._free.acquire()
        running = asyncio.get_running_loop().run_in_executor(self._executor, work)
        running.add_done_callback(lambda _: self._free.release())
        return await asyncio.shield(running)

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

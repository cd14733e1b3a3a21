"""Where requests are read and turned into tokens: short ones on the event loop, one a turn; long ones in threads.
Long answers are written in threads as well.

Whatever takes long never holds up what does not: very long texts have threads of their own, so they wait for each
other only; and of many short requests that come at once, each lets everything else have its turn before the next.
"""

from __future__ import annotations

import asyncio
import sys
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
        self._threads = _Threads(settings, "text", settings.max_text_queued)
        self._long_threads = _Threads(settings, "long-text", settings.max_text_queued)
        self._answers = _Threads(settings, "answer", sys.maxsize)

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

        Raises Overloaded if too much of its kind waits already.
        """
        is_very_long = size > VERY_LONG * self._settings.offload_chars
        return await (self._long_threads if is_very_long else self._threads).run(work)

    async def encoded(self, size: int, work: Callable[[], bytes]) -> bytes:
        """An answer of about `size` bytes, made by `work()`: here, or in a thread of its own kind if it is long.

        It may wait without limit: what it is made of has been computed, and is held, already.
        """
        return await self._answers.run(work) if self.is_long(size) else work()

    def close(self) -> None:
        """Take no more; what runs ends by itself."""
        for threads in (self._threads, self._long_threads, self._answers):
            threads.close()


class _Threads:
    """Work waits outside the executor, whose queue would keep what was taken back, bodies and all."""

    def __init__(self, settings: RouterSettings, name: str, max_waiting: int) -> None:
        self._settings = settings
        self._executor = ThreadPoolExecutor(settings.text_threads, thread_name_prefix=name)
        self._free = asyncio.Semaphore(settings.text_threads)
        self._max_waiting = max_waiting
        self._num_waiting = 0

    async def run(self, work: Callable[[], T]) -> T:
        """What is running when the caller is cancelled runs on, and keeps its thread until it is through.

        Raises Overloaded.
        """
        if self._free.locked() and self._num_waiting >= self._max_waiting:
            raise Overloaded(
                "too many long requests wait to be read", retry_after_s=self._settings.retry_after_s
            )
        self._num_waiting += 1
        try:
            await self._free.acquire()
        finally:
            self._num_waiting -= 1
        running = asyncio.get_running_loop().run_in_executor(self._executor, work)
        running.add_done_callback(self._through)
        await asyncio.wait({running})
        return running.result()

    def close(self) -> None:
        self._executor.shutdown(wait=False, cancel_futures=True)

    def _through(self, running: asyncio.Future[T]) -> None:
        self._free.release()
        if not running.cancelled():
            running.exception()  # NOTE: asyncio logs one that nobody looks at, as after a caller has gone

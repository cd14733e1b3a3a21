"""A worker's grammars: compiled beside the event loop and the engine, before a request is queued."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor

from shared.engine.grammar import GrammarCompiler, GrammarState
from shared.errors import InvalidRequest
from shared.wire import Grammar, Work

COMPILE_TIMEOUT_S = 10.0
_NUM_THREADS = 2


class Grammars:
    """Holds the threads that compile; `close` ends them.

    The compiler is loaded by the first grammar, not by the start of the worker: it costs two seconds of CPU and
    130 MB, and most deployments never see a grammar.
    """

    def __init__(self, load: Callable[[], GrammarCompiler]) -> None:
        self._load = load
        self._loading = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._threads = ThreadPoolExecutor(_NUM_THREADS, thread_name_prefix="grammar")

    async def state_for(self, work: Work) -> GrammarState | None:
        """Where the next token of `work` stands in its grammar; None if it has none.

        Raises InvalidRequest for a grammar that cannot be compiled, or not in time.
        """
        grammar = work.sampling.grammar
        if grammar is None:
            return None
        generated = work.token_ids[work.num_prompt_tokens :]
        loop = asyncio.get_running_loop()
        compiling = loop.run_in_executor(self._threads, self._start, grammar, generated)
        try:
            async with asyncio.timeout(min(COMPILE_TIMEOUT_S, work.timeout_s)):
                return await compiling
        except TimeoutError as exc:
            raise InvalidRequest("the grammar takes too long to compile", param="sampling.grammar") from exc

    def _start(self, grammar: Grammar, generated: list[int]) -> GrammarState:
        with self._loading:
            if self._compiler is None:
                try:
                    self._compiler = self._load()
                except (OSError, ValueError) as exc:
                    raise InvalidRequest("grammars are not supported for this model's tokenizer") from exc
        return self._compiler.start(grammar, generated)

    def close(self) -> None:
        """Take no more; what is being compiled goes on to its end, which is bounded."""
        self._threads.shutdown(wait=False, cancel_futures=True)

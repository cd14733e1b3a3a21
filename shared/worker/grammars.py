"""A worker's grammars: compiled beside the event loop and the engine, before a request is queued."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from shared.engine.grammar import GrammarCompiler, GrammarState
from shared.errors import InvalidRequest
from shared.wire import Work

COMPILE_TIMEOUT_S = 10.0
_NUM_THREADS = 2


class Grammars:
    """Holds the threads that compile; `close` ends them."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
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
        compiling = loop.run_in_executor(self._threads, self._compiler.start, grammar, generated)
        try:
            async with asyncio.timeout(min(COMPILE_TIMEOUT_S, work.timeout_s)):
                return await compiling
        except TimeoutError as exc:
            raise InvalidRequest("the grammar takes too long to compile", param="sampling.grammar") from exc

    def close(self) -> None:
        """Take no more; what is being compiled goes on to its end, which is bounded."""
        self._threads.shutdown(wait=False, cancel_futures=True)

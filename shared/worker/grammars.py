"""A worker's grammars: compiled beside the event loop and the engine, before a request is queued."""

from __future__ import annotations

import asyncio
import contextlib
import threading
import time
from collections.abc import Callable
from typing import TypeVar, cast

from shared.engine.grammar import CompiledGrammar, GrammarCompiler, GrammarState
from shared.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from shared.wire import Grammar, Work

T = TypeVar("T")

COMPILE_TIMEOUT_S = 10.0
_NUM_AT_ONCE = 2
_RETRY_AFTER_S = 1.0


class Grammars:
    """One event loop's. `close` takes no more.

    The compiler is loaded by the first grammar, not by the start of the worker: it costs two seconds of CPU and
    130 MB, and most deployments never see a grammar.
    """

    def __init__(self, load: Callable[[], GrammarCompiler]) -> None:
        self._load = load
        self._loading = threading.Lock()
        self._compiler: GrammarCompiler | None = None
        self._slots = asyncio.Semaphore(_NUM_AT_ONCE)
        self._under_way: dict[Grammar, _Compilation] = {}
        self._closed = False

    async def state_for(self, work: Work) -> GrammarState | None:
        """Where the next token of `work` stands in its grammar; None if it has none.

        Raises InvalidRequest for a grammar that cannot be compiled, or not in time; Overloaded if the time went by
        with other grammars; DeadlineExceeded if it was the request's own.
        """
        grammar = work.sampling.grammar
        if grammar is None:
            return None
        generated = work.token_ids[work.num_prompt_tokens :]
        limit_s = min(COMPILE_TIMEOUT_S, work.timeout_s)
        try:
            async with asyncio.timeout(limit_s):
                compiled = await self._compiled(grammar)
                return await _in_daemon(lambda: compiled.start(generated))
        except TimeoutError as exc:
            if limit_s == work.timeout_s:
                raise DeadlineExceeded("the deadline passed before the grammar was compiled") from exc
            compilation = self._under_way.get(grammar)
            if compilation is None or compilation.seconds() < limit_s / 2:
                raise Overloaded("other grammars are being compiled", retry_after_s=_RETRY_AFTER_S) from exc
            raise InvalidRequest("the grammar takes too long to compile", param="sampling.grammar") from exc

    def close(self) -> None:
        """Take no more. What is being compiled goes on, but the end of the process does not wait for it."""
        self._closed = True

    async def _compiled(self, grammar: Grammar) -> CompiledGrammar:
        """At once if it is kept; else when a compilation, whoever began it, is done."""
        while (found := self._kept(grammar)) is None:
            compilation = self._under_way.get(grammar)
            if compilation is not None:
                # Whoever gives up leaves it running: it has its slot until it ends, and others may want the same.
                return await asyncio.shield(compilation.done)
            await self._slots.acquire()
            if self._closed or grammar in self._under_way:
                self._slots.release()
            else:
                self._begin(grammar)
            if self._closed:
                raise Unavailable("this worker is shutting down", retry_after_s=_RETRY_AFTER_S)
        return found

    def _kept(self, grammar: Grammar) -> CompiledGrammar | None:
        return None if self._compiler is None else self._compiler.cached(grammar)

    def _begin(self, grammar: Grammar) -> None:
        """Start to compile, in a slot that is given back at the end. Raises Overloaded."""

        def compile_it() -> CompiledGrammar:
            compiler = self._loaded()
            compilation.started = time.monotonic()
            return compiler.compiled(grammar)

        def ended(done: asyncio.Future[CompiledGrammar]) -> None:
            del self._under_way[grammar]
            self._slots.release()
            if not done.cancelled():
                done.exception()  # nobody may be left to take it; asyncio would log it as lost

        compilation = _Compilation()
        try:
            compilation.done = _in_daemon(compile_it)
        except Overloaded:
            self._slots.release()
            raise
        self._under_way[grammar] = compilation
        compilation.done.add_done_callback(ended)

    def _loaded(self) -> GrammarCompiler:
        with self._loading:
            if self._compiler is None:
                try:
                    self._compiler = self._load()
                except (OSError, ValueError) as exc:
                    raise InvalidRequest("grammars are not supported for this model's tokenizer") from exc
        return self._compiler


class _Compilation:
    """One grammar that is being compiled. started: when its own work began, the compiler being loaded."""

    def __init__(self) -> None:
        self.started: float | None = None
        self.done: asyncio.Future[CompiledGrammar]

    def seconds(self) -> float:
        """How long it has been at work."""
        return 0.0 if self.started is None else time.monotonic() - self.started


def _in_daemon(call: Callable[[], T]) -> asyncio.Future[T]:
    """`call()` on a thread of its own, which the process can end without. Raises Overloaded if there is none."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[T] = loop.create_future()

    def settle(result: T | None, error: BaseException | None) -> None:
        if done.cancelled():
            return
        if error is not None:
            done.set_exception(error)
        else:
            done.set_result(cast(T, result))

    def run() -> None:
        try:
            outcome: tuple[T | None, BaseException | None] = call(), None
        except BaseException as exc:  # noqa: BLE001 - raised where it is waited for
            outcome = None, exc
        # After the loop is closed nobody is left to tell.
        with contextlib.suppress(RuntimeError):
            loop.call_soon_threadsafe(settle, *outcome)

    try:
        threading.Thread(target=run, name="grammar", daemon=True).start()
    except RuntimeError as exc:
        raise Overloaded("there is no thread for the grammar", retry_after_s=_RETRY_AFTER_S) from exc
    return done

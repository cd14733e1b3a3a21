"""Grammars are compiled beside the loop: who waits for whom, and what is said when it takes too long."""

from __future__ import annotations

import asyncio
import subprocess
import sys
import textwrap
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import cast

import pytest

from shared.engine.grammar import CompiledGrammar, GrammarCompiler, GrammarState
from shared.errors import DeadlineExceeded, InvalidRequest, Overloaded, Unavailable
from shared.wire import Grammar, Sampling, Work
from shared.worker import grammars as module
from shared.worker.grammars import Grammars
from tests.support.tiny_tokenizer import write_tiny_tokenizer

WAIT_S = 20


@pytest.fixture(scope="module")
def compiler(tmp_path_factory: pytest.TempPathFactory) -> GrammarCompiler:
    """A real one."""
    folder = tmp_path_factory.mktemp("tokenizer")
    size = write_tiny_tokenizer(folder)
    return GrammarCompiler.load(folder, vocab_size=size, eos_token_ids=[size - 1])


class GatedCompiler:
    """Compiles `slow...` only once it is let go, all else at once. begun: how many compilations."""

    def __init__(self, inner: GrammarCompiler) -> None:
        self._inner = inner
        self.go = threading.Event()
        self.begun = 0
        self.met = threading.Semaphore(0)

    async def has_met(self, number: int) -> None:
        """Wait for so many more compilations to have begun."""
        for _ in range(number):
            assert await asyncio.to_thread(self.met.acquire, timeout=WAIT_S)

    def cached(self, grammar: Grammar) -> CompiledGrammar | None:
        """What the real one has."""
        return self._inner.cached(grammar)

    def compiled(self, grammar: Grammar) -> CompiledGrammar:
        """As the real one does, after the gate."""
        self.begun += 1
        self.met.release()
        if grammar.text.startswith("slow"):
            assert self.go.wait(WAIT_S)
        return self._inner.compiled(grammar)


@pytest.fixture
def gated(compiler: GrammarCompiler) -> Iterator[GatedCompiler]:
    """Let go at the end, whatever happened."""
    inner = GrammarCompiler(compiler.tokenizer)
    gated = GatedCompiler(inner)
    yield gated
    gated.go.set()


def work(text: str, *, timeout_s: float = 60.0, kind: str = "regex") -> Work:
    """A request for an answer that matches `text`."""
    grammar = Grammar.model_validate({"kind": kind, "text": text})
    return Work(
        request_id="r",
        token_ids=[1],
        num_prompt_tokens=1,
        sampling=Sampling(max_tokens=4, grammar=grammar),
        timeout_s=timeout_s,
    )


def grammars_of(gated: GatedCompiler) -> Grammars:
    """Over a compiler that is loaded at once."""
    return Grammars(lambda: cast(GrammarCompiler, gated))


async def test_a_grammar_becomes_a_state(gated: GatedCompiler) -> None:
    """And no grammar none."""
    grammars = grammars_of(gated)
    free = Work(
        request_id="r", token_ids=[1], num_prompt_tokens=1, sampling=Sampling(max_tokens=1), timeout_s=9
    )

    assert await grammars.state_for(free) is None
    assert isinstance(await grammars.state_for(work("[ab]+")), GrammarState)
    with pytest.raises(InvalidRequest):
        await grammars.state_for(work("(a"))


async def test_what_is_kept_waits_for_no_compilation(gated: GatedCompiler) -> None:
    """Two grammars that took for ever made every other one fail, those that were compiled already included."""
    grammars = grammars_of(gated)
    await grammars.state_for(work("quick"))
    slow = [asyncio.create_task(grammars.state_for(work(f"slow{i}"))) for i in range(2)]
    await gated.has_met(3)

    assert isinstance(await grammars.state_for(work("quick", timeout_s=WAIT_S)), GrammarState)

    gated.go.set()
    assert all(isinstance(state, GrammarState) for state in await asyncio.gather(*slow))


async def test_the_same_grammar_is_compiled_once_for_all_who_wait(gated: GatedCompiler) -> None:
    """And takes one place only, also after somebody gave up."""
    grammars = grammars_of(gated)
    with pytest.raises(DeadlineExceeded):
        await grammars.state_for(work("slow", timeout_s=0.05))
    waiting = [asyncio.create_task(grammars.state_for(work("slow"))) for _ in range(5)]

    assert isinstance(await grammars.state_for(work("other")), GrammarState)
    gated.go.set()
    states = await asyncio.gather(*waiting)

    assert 5 == len(states)
    assert 2 == gated.begun


async def test_a_request_whose_deadline_passes_is_told_so(gated: GatedCompiler) -> None:
    """It was told that its grammar takes too long, as a fault of its own."""
    grammars = grammars_of(gated)
    for text in ("slow0", "slow1", "waits"):
        with pytest.raises(DeadlineExceeded):
            await grammars.state_for(work(text, timeout_s=0.05))


async def test_time_that_went_by_with_other_grammars_is_no_fault_of_this_one(
    gated: GatedCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It can be tried again; a grammar that used the time itself cannot."""
    grammars = grammars_of(gated)
    under_way = [asyncio.create_task(grammars.state_for(work(text))) for text in ("slow0", "slow1")]
    await gated.has_met(2)
    with monkeypatch.context() as hurried:
        hurried.setattr(module, "COMPILE_TIMEOUT_S", 0.1)
        for text in ("slow0", "slow1"):
            with pytest.raises(InvalidRequest):
                await grammars.state_for(work(text))

        with pytest.raises(Overloaded) as caught:
            await grammars.state_for(work("waits"))

    assert caught.value.retryable
    gated.go.set()
    assert isinstance(await _tried_again(grammars, "waits"), GrammarState)
    await asyncio.gather(*under_way)


async def _tried_again(grammars: Grammars, text: str) -> GrammarState | None:
    async with asyncio.timeout(WAIT_S):
        while True:
            try:
                return await grammars.state_for(work(text))
            except Overloaded:
                await asyncio.sleep(0.01)


async def test_a_thread_that_cannot_be_had_costs_one_request_its_grammar_alone(
    gated: GatedCompiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The grammar was an internal error from then on, and its place was lost."""
    grammars = grammars_of(gated)

    def none_left(_: threading.Thread) -> None:
        raise RuntimeError("can't start new thread")

    for _ in range(3):  # more than there are places
        with monkeypatch.context() as full:
            full.setattr(threading.Thread, "start", none_left)
            with pytest.raises(Overloaded):
                await grammars.state_for(work("waits"))
    assert isinstance(await grammars.state_for(work("waits")), GrammarState)


async def test_nothing_is_begun_after_the_end(gated: GatedCompiler) -> None:
    """Whoever waited for a place is told that the worker stops."""
    grammars = grammars_of(gated)
    slow = [asyncio.create_task(grammars.state_for(work(f"slow{i}"))) for i in range(2)]
    await gated.has_met(2)
    waits = asyncio.create_task(grammars.state_for(work("waits")))
    await asyncio.sleep(0)
    grammars.close()
    gated.go.set()

    with pytest.raises(Unavailable):
        await waits
    await asyncio.gather(*slow)
    assert 2 == gated.begun


async def test_a_tokenizer_that_the_library_does_not_know_is_the_callers_fault() -> None:
    """Each time: nothing is kept of it."""

    def load() -> GrammarCompiler:
        raise ValueError("unknown kind")

    grammars = Grammars(load)
    for _ in range(3):
        with pytest.raises(InvalidRequest, match="tokenizer"):
            await grammars.state_for(work("a"))


def test_a_process_ends_while_a_grammar_is_compiled(tmp_path: Path) -> None:
    """A worker that had been told to stop stayed for as long as the compilation took."""
    script = """
        import asyncio, threading
        from shared.errors import DeadlineExceeded
        from shared.wire import Grammar, Sampling, Work
        from shared.worker.grammars import Grammars

        async def main():
            grammars = Grammars(lambda: threading.Event().wait())
            sampling = Sampling(max_tokens=4, grammar=Grammar(kind="regex", text="a"))
            work = Work(request_id="r", token_ids=[1], num_prompt_tokens=1, sampling=sampling, timeout_s=0.1)
            try:
                await grammars.state_for(work)
            except DeadlineExceeded:
                print("told")
            grammars.close()

        asyncio.run(main())
    """
    root = Path(module.__file__).parents[2]

    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(script)],
        cwd=root,
        capture_output=True,
        text=True,
        timeout=60,
        check=True,
    )

    assert "told\n" == done.stdout

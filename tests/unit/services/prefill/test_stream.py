"""A prefill request whose router leaves: its blocks are freed when its sender has stopped, not before."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Iterator
from concurrent.futures import Executor, ThreadPoolExecutor
from contextlib import suppress
from types import SimpleNamespace
from typing import Any, cast

import pytest

from services.prefill.kept import KeptHandoffs
from services.prefill.stream import PrefillContext, PrefillStream
from shared.engine.blocks import BlockPool
from shared.engine.engine import Engine
from shared.kv.outgoing import Send
from shared.kv.overlap import LayerOverlap
from shared.kv.progress import TransferCancelled
from shared.kv.shape import KvShape
from shared.kv.ticket import Ticket, kv_url
from shared.wire import Handoff, PrefillRequest, Sampling
from tests.unit.shared.engine.helpers import CountingRunner, make_limits

SECRET = b"a shared secret"
WAIT_S = 10


class StubbornSender:
    """Notices that it is to stop, but reads blocks until `let_go`, as one whose peer still copies."""

    def __init__(self) -> None:
        self.begun, self.told, self.let_go = threading.Event(), threading.Event(), threading.Event()

    def send(self, send: Send) -> None:
        self.begun.set()
        stopped = threading.Event()
        # Already the wait may learn of it, if this thread wakes up late.
        with suppress(TransferCancelled):
            send.progress.wait_finished(WAIT_S)
            with send.progress.interrupting(stopped.set):
                stopped.wait(WAIT_S)
        self.told.set()
        self.let_go.wait(WAIT_S)
        raise TransferCancelled("told to")


class NoGrammars:
    """Nobody asks for one."""

    async def state_for(self, _: PrefillRequest) -> None:
        return None


class Serving:
    """An engine of 64 blocks, and streams that send by `sender` on `senders`."""

    def __init__(self) -> None:
        self.pool = BlockPool(64, 4)
        self.engine = Engine(self.pool, make_limits(), CountingRunner(), ())
        self.engine.start()
        self.sender = StubbornSender()

    def stream(self, senders: Executor) -> PrefillStream:
        """A request of eight blocks for a reservation that nobody made."""
        worker = SimpleNamespace(
            engine=self.engine,
            grammars=NoGrammars(),
            limits=make_limits(),
            kv_shape=KvShape(3, 2, 16, "F32"),
            kv_source=lambda _: None,
            blocks_in_use=lambda _: None,
            kv_wire=None,
            fingerprint=SimpleNamespace(digest="f" * 32),
        )
        context = PrefillContext(
            worker=cast(Any, worker),
            secret=SECRET,
            senders=senders,
            sender=cast(Any, self.sender),
            metrics=cast(Any, SimpleNamespace(ended=lambda _: None, sent=lambda _: None)),
            kept=KeptHandoffs(None, max_files=1, max_bytes=1),
            overlap=LayerOverlap(0, 1),
        )
        url = kv_url("127.0.0.1", 1, "kv-1")
        work = PrefillRequest(
            request_id="r",
            token_ids=list(range(1, 31)),
            num_prompt_tokens=30,
            sampling=Sampling(max_tokens=4, temperature=0),
            timeout_s=30,
            handoff=Handoff(
                handoff_id="kv-1",
                epoch=1,
                kv_url=url,
                ticket=Ticket("kv-1", 1, url, "boot", float("1e18")).sign(SECRET),
                have_tokens=0,
            ),
        )
        return PrefillStream(context, work)


@pytest.fixture
def serving() -> Iterator[Serving]:
    """Found empty at the end."""
    made = Serving()
    yield made
    made.engine.close()
    made.pool.check_integrity()
    assert 0 == made.pool.counts().live


async def left_after_first(stream: PrefillStream) -> None:
    """The router takes the first token, and hangs up while it waits for what follows."""
    await stream.start()
    chunks = stream.chunks()
    assert b"first" in await anext(chunks)
    waiting = asyncio.ensure_future(anext(chunks))
    await asyncio.sleep(0)
    waiting.cancel()
    with suppress(asyncio.CancelledError):
        await waiting


async def test_blocks_wait_for_the_thread_that_reads_them(serving: Serving) -> None:
    """Cancelling the wait for the sender used to look like its end."""
    with ThreadPoolExecutor(1) as senders:
        stream = serving.stream(senders)
        await left_after_first(stream)
        assert await asyncio.to_thread(serving.sender.begun.wait, WAIT_S)
        closing = asyncio.ensure_future(stream.aclose())
        assert await asyncio.to_thread(serving.sender.told.wait, WAIT_S)
        assert not closing.done()
        assert 8 == serving.pool.counts().live
        serving.sender.let_go.set()
        await asyncio.wait_for(closing, WAIT_S)


async def test_a_send_that_has_not_begun_is_not_waited_for(serving: Serving) -> None:
    """All sending threads may be busy for long with others' hand-offs."""
    others_end = threading.Event()
    with ThreadPoolExecutor(1) as senders:
        senders.submit(others_end.wait, WAIT_S)
        stream = serving.stream(senders)
        await left_after_first(stream)
        await asyncio.wait_for(stream.aclose(), WAIT_S)
        assert not serving.sender.begun.is_set()
        others_end.set()

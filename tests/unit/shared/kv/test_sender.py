"""The sender between two hand-offs, and while it waits for KV: what one leaves to the next; what ends a wait."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from contextlib import closing

import pytest

from shared.errors import ReservationGone
from shared.kv.outgoing import OutgoingPut, Send
from shared.kv.progress import Progress
from shared.wire import Sent
from tests.unit.shared.kv.blobs import SHAPE, Pool, expected, manifest_for
from tests.unit.shared.kv.conftest import Listen
from tests.unit.shared.kv.transfer import WAIT_S, finished, granted, reservation, sender_over


@pytest.mark.parametrize("name", ["unix", "tcp"])
def test_a_cancel_after_the_answer_does_not_harm_the_next_one(
    listen: Listen, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    """The connection was kept, interrupted for good, and somebody else's hand-off failed."""
    book = reservation()
    listening = listen(book)
    handoff = granted(listening.listener.offer("127.0.0.1"))
    source = Pool(SHAPE, num_tokens=10, seed=1)
    progress = finished()
    stats = OutgoingPut.stats

    def client_leaves(put: OutgoingPut, transport: str) -> Sent:
        progress.cancel("client_gone")
        return stats(put, transport)

    with closing(sender_over(name)) as sender:
        with monkeypatch.context() as patched:
            patched.setattr(OutgoingPut, "stats", client_leaves)
            sender.send(Send(handoff, "r1", manifest_for(expected()), source.views(), progress))
        listening.next_report()
        book.committed.clear()
        sender.send(Send(handoff, "r2", manifest_for(expected()), source.views(), finished()))
    assert source.content() == book.pool.content()


@pytest.mark.parametrize("name", ["shm", "unix", "tcp"])
def test_a_refusal_ends_the_wait_for_kv(listen: Listen, name: str) -> None:
    """Prefill went on computing, for as long as it took, what nobody wanted any more."""
    book = reservation()
    handoff = granted(listen(book).listener.offer("127.0.0.1"))
    source = Pool(SHAPE, num_tokens=10, seed=1)
    progress = Progress()
    with closing(sender_over(name, pool=source)) as sender, ThreadPoolExecutor() as threads:
        sending = threads.submit(
            sender.send, Send(handoff, "r1", manifest_for(expected()), source.views(), progress)
        )
        assert book.attached.wait(WAIT_S)
        book.cancel()
        try:
            with pytest.raises(ReservationGone):
                sending.result(WAIT_S)
        finally:
            progress.cancel("the test is over")

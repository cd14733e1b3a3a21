"""What connections do when workers are at their end, on both event loops: they tell of a loss in another order."""

from __future__ import annotations

import asyncio
import socket
import threading
from collections.abc import Iterator
from contextlib import contextmanager

from tests.contract.conftest import ClusterMaker, answer, both_loops, job
from tests.contract.fakes import listener, token_at

pytestmark = both_loops


@contextmanager
def closing_at_once(urls: list[str]) -> Iterator[None]:
    """Somebody at these addresses who takes every connection and closes it, as a proxy of a dead worker does."""
    sockets = [listener(int(url.rsplit(":", 1)[1])) for url in urls]

    def serve(sock: socket.socket) -> None:
        while True:
            try:
                sock.accept()[0].close()
            except OSError:
                return

    threads = [threading.Thread(target=serve, args=(sock,)) for sock in sockets]
    for sock, thread in zip(sockets, threads, strict=True):
        sock.listen()
        thread.start()
    try:
        yield
    finally:
        for sock, thread in zip(sockets, threads, strict=True):
            sock.shutdown(socket.SHUT_RDWR)
            thread.join()
            sock.close()


async def test_workers_that_only_close_are_passed_over_at_once(cluster: ClusterMaker) -> None:
    """Each costs a try and no wait; on uvloop the router once waited for the whole limit of the stage."""
    async with cluster(decode=8, health_interval_s=60, max_tries=8) as c:
        for dead in c.decodes[:-1]:
            await dead.kill()
            await dead.join()
        with closing_at_once([dead.url for dead in c.decodes[:-1]]):
            async with asyncio.timeout(30), c.dispatcher.relay(job()) as relay:
                assert [[token_at(0, 20 + i) for i in range(6)]] == await answer(relay)
            await c.quiet()

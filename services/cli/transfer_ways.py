"""Ways to bring bytes from one process to another: from the call to the last word of the receiver, or as they say.

One process sends, one (`serve`) receives, each on its own core. A way is asked for a number of tokens and returns
the seconds it took. The KV transports run as in the workers (`services.cli.transfer_kv`).
"""

from __future__ import annotations

import itertools
import multiprocessing
import os
import socket
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from ctypes import c_double
from functools import partial
from multiprocessing.connection import Connection as Pipe
from threading import Thread
from typing import Any

from services.cli import transfer_nixl
from services.cli.transfer_kv import (
    SECRET,
    SHAPE,
    Book,
    Pool,
    Setup,
    Way,
    injected,
    kv_way,
    opened,
    reserved,
)
from shared.kv.book import Received
from shared.kv.limits import ReceiveLimits
from shared.kv.outgoing import SendTimeouts
from shared.kv.put import PutReport
from shared.kv.receiver import KvListener
from shared.kv.sender import KvSender
from shared.kv.transports import nixl_wire, shm_wire
from shared.kv.transports.choice import offered, usable

MEMCPY, RAW_TCP, QUEUE = "memcpy, twice", "raw TCP", "pickle + Queue"
BARE_NIXL, NIXL_AS_IT_COMES = "NIXL alone", "NIXL alone, as it comes"

_LENGTH_BYTES = 8


def serve(setup: Setup, pipe: Pipe, queue: Any, committed_at: c_double) -> None:
    """The receiving process: all ways at once, until the pipe closes.

    committed_at: set when KV has been injected, on time.monotonic(), which is the same in all processes.
    """
    import torch  # noqa: PLC0415 - takes seconds, and `handoff bench --help` needs none of it

    os.sched_setaffinity(0, {setup.cores[1]})
    torch.set_num_threads(1)

    def no_report(_: PutReport) -> None: ...

    def committed(_: Received) -> None:
        committed_at.value = time.monotonic()

    pool = Pool(setup, seed=2)
    offer = offered(",".join(setup.transports))
    listener = KvListener(
        "127.0.0.1",
        0,
        Book(pool.views(), reserved, committed),
        secret=SECRET,
        limits=ReceiveLimits(),
        on_end=no_report,
        transports=offer.transports,
        nixl=offer.nixl,
    )
    listener.start()
    raw = socket.create_server(("127.0.0.1", 0))
    total_bytes = setup.max_tokens * SHAPE.bytes_per_token
    Thread(target=_take_raw, args=(raw, bytearray(total_bytes)), daemon=True).start()
    bare = socket.create_server(("127.0.0.1", 0))
    Thread(target=transfer_nixl.receive, args=(bare, total_bytes), daemon=True).start()
    target = [torch.zeros(setup.max_tokens * SHAPE.row_bytes // 2, dtype=torch.bfloat16) for _ in range(56)]
    try:
        pipe.send((listener.offer("127.0.0.1"), raw.getsockname()[1], bare.getsockname()[1]))
        while pipe.recv() == QUEUE:
            for own, sent in zip(target, queue.get(), strict=True):
                own[: len(sent)] = sent
            pipe.send(True)
    except EOFError:
        pass
    finally:
        listener.close()


def _take_raw(listening: socket.socket, buffer: bytearray) -> None:
    sock, _ = listening.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    view = memoryview(buffer)
    while head := sock.recv(_LENGTH_BYTES, socket.MSG_WAITALL):
        left = view[: int.from_bytes(head, "little")]
        while left:
            left = left[sock.recv_into(left) :]
        sock.sendall(b"\0")


@contextmanager
def ways(setup: Setup) -> Iterator[dict[str, Way]]:
    """Every way by name, ready to be used; this process keeps to the sender's core within."""
    import torch  # noqa: PLC0415 - takes seconds, and `handoff bench --help` needs none of it

    context = multiprocessing.get_context("spawn")
    before = os.sched_getaffinity(0)
    with ExitStack() as stack:
        queue = context.Queue()
        pipe, theirs = context.Pipe()
        committed_at = context.RawValue(c_double)
        process = context.Process(target=serve, args=(setup, theirs, queue, committed_at), daemon=True)
        process.start()
        theirs.close()
        stack.callback(process.join, 10)
        stack.callback(pipe.close)
        stack.callback(os.sched_setaffinity, 0, before)
        os.sched_setaffinity(0, {setup.cores[0]})
        torch.set_num_threads(1)
        offer, raw_port, nixl_port = pipe.recv()
        made: dict[str, Way] = {
            MEMCPY: _memcpy(setup),
            RAW_TCP: _raw_tcp(setup, raw_port, stack),
            QUEUE: _queue(setup, pipe, queue),
        }
        numbers = itertools.count()
        threads = stack.enter_context(ThreadPoolExecutor(1))
        for name in setup.transports:
            pool = Pool(setup, seed=1, shareable=name == shm_wire.NAME)
            for transport in usable(name, pool=pool.memory, secret=SECRET):
                if name == nixl_wire.NAME:
                    total_bytes = setup.max_tokens * SHAPE.bytes_per_token
                    made[BARE_NIXL] = nixl_way(transfer_nixl.sending(nixl_port, total_bytes, stack))
                sender = KvSender(SECRET, [transport], SendTimeouts())
                stack.callback(sender.close)
                new_way = partial(kv_way, sender, pool.views(), offer, numbers)
                made[name] = new_way()
                made[opened(name)] = new_way(threads)
                made[injected(name)] = new_way(threads, injected_at=lambda: committed_at.value)
        yield made


def _memcpy(setup: Setup) -> Way:
    size = setup.max_tokens * SHAPE.bytes_per_token
    first, second, third = (memoryview(bytearray(b"\1") * size) for _ in range(3))

    def copy_twice(num_tokens: int) -> float:
        num_bytes = num_tokens * SHAPE.bytes_per_token
        began = time.perf_counter()
        second[:num_bytes] = first[:num_bytes]
        third[:num_bytes] = second[:num_bytes]
        return time.perf_counter() - began

    return copy_twice


def _raw_tcp(setup: Setup, port: int, stack: ExitStack) -> Way:
    sock = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    content = memoryview(bytearray(b"\1") * (setup.max_tokens * SHAPE.bytes_per_token))

    def send(num_tokens: int) -> float:
        num_bytes = num_tokens * SHAPE.bytes_per_token
        began = time.perf_counter()
        sock.sendall(num_bytes.to_bytes(_LENGTH_BYTES, "little"))
        sock.sendall(content[:num_bytes])
        sock.recv(1)
        return time.perf_counter() - began

    return send


def nixl_way(be_read: transfer_nixl.BeRead) -> Way:
    """The NIXL library alone, asked for tokens."""
    return lambda num_tokens: be_read(num_tokens * SHAPE.bytes_per_token)


def _queue(setup: Setup, pipe: Pipe, queue: Any) -> Way:
    import torch  # noqa: PLC0415 - takes seconds, and `handoff bench --help` needs none of it

    rows = setup.max_tokens * SHAPE.row_bytes // 2
    tensors = [torch.ones(rows, dtype=torch.bfloat16) for _ in range(SHAPE.num_tensors)]

    def send(num_tokens: int) -> float:
        content = [tensor[: num_tokens * SHAPE.row_bytes // 2].clone() for tensor in tensors]
        pipe.send(QUEUE)
        began = time.perf_counter()
        queue.put(content)
        pipe.recv()
        return time.perf_counter() - began

    return send

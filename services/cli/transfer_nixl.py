"""The NIXL library alone, as a yardstick: one read of all bytes, announced and answered over a socket.

Driven by its callers, as this project drives it; or with its own settings, as it comes: a thread of its own on each
side, which never sleeps.
"""

from __future__ import annotations

import multiprocessing
import select
import signal
import socket
import struct
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from multiprocessing.connection import Connection as Pipe

import numpy as np

from shared.kv.host_memory import own_memory
from shared.kv.pool_memory import address_of
from shared.kv.transports.nixl_agent import NixlAgent

_HEAD = struct.Struct("<QQ")
_NUM_BYTES = struct.Struct("<Q")
_LONGEST_WAIT_S = 0.0001
_PAUSE_S = 0.00005


# How long the peer took to read so many bytes.
BeRead = Callable[[int], float]


def sending(port: int, total_bytes: int, stack: ExitStack, *, as_it_comes: bool = False) -> BeRead:
    """The side that is read from. Raises TransportUnavailable without the library."""
    agent = NixlAgent(as_it_comes=as_it_comes)
    memory = memoryview(own_memory(total_bytes))
    memory[:] = b"\1" * total_bytes
    stack.callback(memory.release)
    address = address_of(memory)
    stack.callback(agent.register((address, total_bytes)).close)
    sock = stack.enter_context(socket.create_connection(("127.0.0.1", port)))
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    metadata = agent.metadata()
    sock.sendall(_HEAD.pack(len(metadata), address) + metadata)

    def be_read(num_bytes: int) -> float:
        began = time.perf_counter()
        sock.sendall(_NUM_BYTES.pack(num_bytes))
        while not select.select([sock], [], [], _LONGEST_WAIT_S)[0]:
            agent.notices()
        if not sock.recv(1):
            raise ConnectionResetError("the side that reads has gone")
        return time.perf_counter() - began

    return be_read


def receive(listening: socket.socket, total_bytes: int, *, as_it_comes: bool = False) -> None:
    """The side that reads, for one connection; without one it waits until its process ends."""
    sock, _ = listening.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    agent = NixlAgent(as_it_comes=as_it_comes)
    memory = memoryview(own_memory(total_bytes))
    memory[:] = bytes(total_bytes)
    own = address_of(memory)
    registered = agent.register((own, total_bytes))
    metadata_bytes, theirs = _HEAD.unpack(sock.recv(_HEAD.size, socket.MSG_WAITALL))
    peer = agent.meet(sock.recv(metadata_bytes, socket.MSG_WAITALL))
    while wanted := sock.recv(_NUM_BYTES.size, socket.MSG_WAITALL):
        (num_bytes,) = _NUM_BYTES.unpack(wanted)
        local, remote = (np.array([(at, num_bytes, 0)], dtype=np.uint64) for at in (own, theirs))
        read = agent.read(peer, local, remote)
        while not read.done():
            time.sleep(_PAUSE_S)
        sock.sendall(b"\0")
    registered.close()


@contextmanager
def reading_as_it_comes(total_bytes: int) -> Iterator[BeRead]:
    """From this process to a new one, on all cores. Nothing else should be measured within.

    Raises TransportUnavailable; EOFError or OSError when the other process has ended.
    """
    context = multiprocessing.get_context("spawn")
    with ExitStack() as stack:
        pipe, theirs = context.Pipe()
        stack.callback(pipe.close)
        process = context.Process(target=_receive_alone, args=(theirs, total_bytes), daemon=True)
        process.start()
        theirs.close()
        stack.callback(process.join)
        stack.callback(process.kill)
        yield sending(pipe.recv(), total_bytes, stack, as_it_comes=True)


def _receive_alone(pipe: Pipe, total_bytes: int) -> None:
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # its parent ends it
    with socket.create_server(("127.0.0.1", 0)) as listening:
        pipe.send(listening.getsockname()[1])
        receive(listening, total_bytes, as_it_comes=True)

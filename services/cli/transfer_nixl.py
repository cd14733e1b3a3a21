"""The NIXL library alone, as a yardstick: one read of all bytes, announced and answered over a socket."""

from __future__ import annotations

import select
import socket
import struct
import time
from collections.abc import Callable
from contextlib import ExitStack

import numpy as np

from shared.kv.host_memory import own_memory
from shared.kv.pool_memory import address_of
from shared.kv.transports.nixl_agent import NixlAgent

_HEAD = struct.Struct("<QQ")
_NUM_BYTES = struct.Struct("<Q")
_LONGEST_WAIT_S = 0.0001
_PAUSE_S = 0.00005


def sending(port: int, total_bytes: int, stack: ExitStack) -> Callable[[int], float]:
    """The side that is read from: returns how long the peer took to read so many bytes.

    Raises TransportUnavailable without the library.
    """
    agent = NixlAgent()
    memory = memoryview(own_memory(total_bytes))
    memory[:] = b"\1" * total_bytes
    stack.callback(memory.release)
    address, _ = address_of(memory)
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
        sock.recv(1)
        return time.perf_counter() - began

    return be_read


def receive(listening: socket.socket, total_bytes: int) -> None:
    """The side that reads, for one connection. Ends without one when the library is missing on the other side."""
    sock, _ = listening.accept()
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    agent = NixlAgent()
    memory = memoryview(own_memory(total_bytes))
    memory[:] = bytes(total_bytes)
    own, _ = address_of(memory)
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

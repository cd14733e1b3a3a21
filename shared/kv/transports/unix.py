"""HTTP over a Unix socket: the same as over TCP, between two processes of one user on one host.

The socket has a name in Linux' abstract namespace, not a file: nothing is left of it after any death, and processes
in another network namespace (another container) do not see it. Both sides check the other's user id, which does for
an abstract name what mode 0600 does for a file.
"""

from __future__ import annotations

import contextlib
import hashlib
import os
import secrets
import socket
import struct
from pathlib import Path

from shared.kv.stream import Stream
from shared.kv.ticket import Ticket
from shared.kv.transports.base import Connection, Interrupting, TransportUnavailable

NAME = "unix"

BUFFER_BYTES = 1024 * 1024
_BACKLOG = 128
_CREDENTIALS = struct.Struct("3i")


class UnixTransport:
    """Sender's side (shared.kv.transports.base.Transport). An address is an abstract name."""

    name = NAME
    slower_than_memory = False

    def __init__(self) -> None:
        self._host_id = host_id()

    def self_test(self) -> None:
        """Listen, connect and ask who is there."""
        try:
            with listen(new_name()) as server, socket.socket(socket.AF_UNIX, socket.SOCK_STREAM) as client:
                client.settimeout(1.0)
                client.connect(server.getsockname())
                accepted, _ = server.accept()
                with accepted:
                    if not (is_own_user(accepted) and is_own_user(client)):
                        raise TransportUnavailable("the kernel does not tell a peer's user")
        except (OSError, AttributeError) as exc:
            raise TransportUnavailable(f"Unix sockets do not work here: {exc}") from exc

    def address(self, ticket: Ticket) -> str | None:
        """The issuer's socket, if it is on this host."""
        return ticket.kv_socket if ticket.host_id == self._host_id else None

    def connect(self, address: str, deadline: float, interrupting: Interrupting) -> Connection:
        """To a process of the same user."""
        return Connection(connect(address, deadline, interrupting))

    def close(self) -> None:
        """Nothing is left but what connections hold."""


def connect(name: str, deadline: float, interrupting: Interrupting) -> Stream:
    """A stream to the process that listens to an abstract name. Raises OSError, TransportUnavailable."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER_BYTES)
    stream = Stream(sock)
    try:
        with interrupting(stream.interrupt):
            stream.connect(f"\0{name}", deadline)
        if not is_own_user(sock):
            raise TransportUnavailable("another user listens to that Unix socket")
    except BaseException:
        stream.close()
        raise
    return stream


def new_name() -> str:
    """An abstract name that nobody can have guessed."""
    return f"handoff-kv-{secrets.token_hex(16)}"


def listen(name: str) -> socket.socket:
    """A socket that listens to an abstract name. Raises OSError."""
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.bind(f"\0{name}")
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def is_own_user(sock: socket.socket) -> bool:
    """Whether a Unix socket's peer runs as this process's user."""
    credentials = sock.getsockopt(socket.SOL_SOCKET, socket.SO_PEERCRED, _CREDENTIALS.size)
    _, uid, _ = _CREDENTIALS.unpack(credentials)
    return bool(uid == os.geteuid())


def host_id() -> str | None:
    """The same for two processes exactly if they can reach each other's abstract sockets; None if unknown."""
    with contextlib.suppress(OSError):
        boot = Path("/proc/sys/kernel/random/boot_id").read_text()
        network = Path("/proc/self/ns/net").stat()
        content = f"{boot.strip()} {network.st_dev} {network.st_ino}"
        return hashlib.blake2b(content.encode(), digest_size=8).hexdigest()
    return None

"""HTTP over TCP: works between any two hosts."""

from __future__ import annotations

import contextlib
import socket
from urllib.parse import urlsplit

from shared.kv.stream import Stream
from shared.kv.ticket import Ticket
from shared.kv.transports.base import Connection, Interrupting

NAME = "tcp"

_BACKLOG = 128


class TcpTransport:
    """Sender's side (shared.kv.transports.base.Transport). An address is `host:port`."""

    name = NAME
    slower_than_memory = True

    def self_test(self) -> None:
        """Every host has it; a peer that cannot be reached is an error of that hand-off."""

    def address(self, ticket: Ticket) -> str | None:
        """The authority of the ticket's URL."""
        with contextlib.suppress(ValueError):
            url = urlsplit(ticket.kv_url)
            if url.scheme == "http" and url.hostname and url.port:
                return url.netloc
        return None

    def connect(self, address: str, deadline: float, interrupting: Interrupting) -> Connection:
        """To the first address of the host that answers."""
        url = urlsplit(f"//{address}")
        refused = OSError("the KV URL's host has no address")
        for family, kind, protocol, _, peer in socket.getaddrinfo(
            url.hostname, url.port, type=socket.SOCK_STREAM
        ):
            sock = socket.socket(family, kind, protocol)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            stream = Stream(sock)
            try:
                with interrupting(stream.interrupt):
                    stream.connect(peer, deadline)
            except OSError as exc:
                stream.close()
                refused = exc
                continue
            except BaseException:
                stream.close()
                raise
            return Connection(stream)
        raise refused

    def close(self) -> None:
        """Nothing is left but what connections hold."""


def listen(host: str, port: int) -> socket.socket:
    """A listening socket. host: a name or address of this host; port: 0 for any free one. Raises OSError."""
    family, kind, protocol, _, address = socket.getaddrinfo(
        host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
    )[0]
    sock = socket.socket(family, kind, protocol)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind(address)
        sock.listen(_BACKLOG)
    except OSError:
        sock.close()
        raise
    return sock


def prepare(sock: socket.socket) -> None:
    """Set up a connection that was accepted. Raises OSError."""
    sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)

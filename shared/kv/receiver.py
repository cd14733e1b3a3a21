"""The KV listener of a decode worker: a second port, and a Unix socket, whose bodies go straight into the pool.

Its own threads, not the event loop: a server that hands bodies over piecewise would cost more than the network.
One thread accepts, one thread serves each connection, and their number is bounded.
"""

from __future__ import annotations

import select
import socket
import threading
import time
import traceback
from collections.abc import Callable, Iterable
from dataclasses import dataclass

from shared.kv.answers import error_body, say_last_word, too_many
from shared.kv.book import ReceiveBook
from shared.kv.carrier import MakeCarrier
from shared.kv.limits import ReceiveLimits
from shared.kv.peer import Peer
from shared.kv.put import PutReport, serve_put
from shared.kv.stream import Interrupted, Stream
from shared.kv.ticket import kv_url
from shared.kv.transports import nixl_wire, shm_ring, shm_wire, tcp, unix
from shared.kv.transports.nixl_peers import NixlPeers
from shared.kv.transports.nixl_reads import NixlCarrier
from shared.kv.transports.shm_reads import MappedPools

_OUT_OF_RESOURCES_WAIT_S = 0.2
_TICKET_WAIT_S = 0.5
_MOST_LEAVING = 64


@dataclass(frozen=True, slots=True)
class Offer:
    """Where a listener can be reached, for tickets. host: of the URL, as prefill workers reach it.

    host_id, kv_socket: as in a ticket.
    """

    host: str
    port: int
    transports: tuple[str, ...]
    host_id: str | None
    kv_socket: str | None

    def kv_url(self, handoff_id: str) -> str:
        """Where the KV of one hand-off goes over TCP."""
        return kv_url(self.host, self.port, handoff_id)


class _Served:
    """A connection in the listener's books. Read and written under the listener's lock.

    since: on time.monotonic(). idle: between two PUTs. One whose peer gives way will soon end.
    """

    def __init__(self, peer: Peer) -> None:
        self.peer = peer
        self.since = time.monotonic()
        self.idle = False


_Group = dict[threading.Thread, _Served]


class KvListener:
    """Listens from construction on; accepts between `start` and `close`.

    host: a name or address of this host. port: 0 for any free one; `port` tells which.
    transports: what may be offered beside TCP, which always is. `offer` says what is. nixl: if that is offered too;
    it is closed with the listener.
    on_end: told of every PUT, from the thread that served it; must not raise or block.
    """

    def __init__(
        self,
        host: str,
        port: int,
        book: ReceiveBook,
        *,
        secret: bytes,
        limits: ReceiveLimits,
        on_end: Callable[[PutReport], None],
        transports: Iterable[str] = (),
        nixl: NixlPeers | None = None,
    ) -> None:
        self._book = book
        self._secret = secret
        self._limits = limits
        self._on_end = on_end
        self._lock = threading.Lock()
        self._serving: _Group = {}
        self._refusing: _Group = {}
        self._closing = threading.Event()
        self._wake_read, self._wake_write = socket.socketpair()
        self._sockets: dict[str, socket.socket] = {}
        local = [name for name in transports if name in (shm_wire.NAME, unix.NAME)]
        self._host_id = unix.host_id() if local else None
        if self._host_id is None:
            local = []
        self._nixl = nixl
        self._carriers: dict[str, MakeCarrier] = {
            shm_wire.HEADER.lower(): MappedPools().carrier,
            shm_ring.HEADER.lower(): shm_ring.SegmentCarrier,
            nixl_wire.HEADER.lower(): lambda text, _: NixlCarrier(nixl, secret, text),
        }
        self._transports = (*local, *([nixl_wire.NAME] if nixl else []), tcp.NAME)
        self._kv_socket = unix.new_name() if local else None
        try:
            self._sockets[tcp.NAME] = tcp.listen(host, port)
            if self._kv_socket is not None:
                self._sockets[unix.NAME] = unix.listen(self._kv_socket)
            for sock in self._sockets.values():
                sock.setblocking(False)
        except OSError:
            self._close_sockets()
            raise
        self._acceptor = threading.Thread(target=self._accept, name="kv-accept", daemon=True)

    @property
    def port(self) -> int:
        """The TCP port that it listens on."""
        return int(self._sockets[tcp.NAME].getsockname()[1])

    def offer(self, host: str) -> Offer:
        """What to tell a prefill worker. host: as it reaches this one."""
        return Offer(host, self.port, self._transports, self._host_id, self._kv_socket)

    @property
    def num_connections(self) -> int:
        """Connections being served, idle ones included."""
        with self._lock:
            return len(self._serving)

    def start(self) -> None:
        """Begin to accept."""
        self._acceptor.start()

    def close(self, timeout_s: float = 10.0) -> bool:
        """Stop accepting, end every receive (503), join all threads. False if a commit outlived `timeout_s`."""
        if self._closing.is_set():
            return True
        deadline = time.monotonic() + timeout_s
        self._closing.set()
        self._wake_write.send(b"\0")
        if self._acceptor.ident is not None:
            self._acceptor.join()
        with self._lock:
            threads = self._serving | self._refusing
        for served in threads.values():
            served.peer.stream.interrupt()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._close_sockets()
        if self._nixl is not None:
            self._nixl.close()
        return not any(thread.is_alive() for thread in threads)

    def _close_sockets(self) -> None:
        for sock in self._sockets.values():
            sock.close()
        self._wake_read.close()
        self._wake_write.close()

    def _accept(self) -> None:
        poll = select.poll()
        poll.register(self._wake_read, select.POLLIN)
        by_fd = {sock.fileno(): (name, sock) for name, sock in self._sockets.items()}
        for fd in by_fd:
            poll.register(fd, select.POLLIN)
        while True:
            ready = poll.poll()
            if self._closing.is_set():
                return
            for fd, _ in ready:
                name, listening = by_fd[fd]
                try:
                    sock, _ = listening.accept()
                except (BlockingIOError, ConnectionError):
                    continue  # it left before we came
                except OSError:
                    # Out of descriptors or memory: the peer stays in the backlog, and poll() would return at once.
                    with self._lock:
                        self._make_room()
                    self._closing.wait(_OUT_OF_RESOURCES_WAIT_S)
                    continue
                self._take(sock, name)

    def _take(self, sock: socket.socket, transport: str) -> None:
        """Serve the connection, or refuse it, on a thread of its own; drop it if even refusals are too many."""
        with self._lock:
            if self._has_room() or self._make_room():
                group, target = self._serving, self._serve
            elif len(self._refusing) < self._limits.max_connections:
                group, target = self._refusing, self._refuse
            else:
                sock.close()
                return
            try:
                if transport == tcp.NAME:
                    tcp.prepare(sock)
                elif not unix.is_own_user(sock):
                    sock.close()
                    return
                served = _Served(Peer(Stream(sock), transport, self._carriers))
                thread = threading.Thread(
                    target=self._run, args=(group, target, served), name="kv", daemon=True
                )
                group[thread] = served
            except OSError:
                sock.close()
                self._make_room()
                return
        try:
            thread.start()
        except RuntimeError:  # no thread can be had
            self._forget(group, thread, served)

    def _staying(self) -> list[_Served]:
        return [served for served in self._serving.values() if not served.peer.gives_way]

    def _has_room(self) -> bool:
        """For one more to be served. Called under the lock."""
        return len(self._staying()) < self._limits.max_connections

    def _make_room(self) -> bool:
        """End a connection that nobody will miss, if there is one. Called under the lock.

        Whoever sends KV shows a ticket at once; connections without one can be had by anybody. So first the oldest
        that has had time for that, then one that waits for another PUT, then the oldest without a ticket.
        """
        staying = self._staying()
        if len(self._serving) - len(staying) >= _MOST_LEAVING:
            return False
        strangers = [served for served in staying if not served.peer.has_ticket]
        idle = [served for served in staying if served.idle]
        had_time = [served for served in strangers[:1] if time.monotonic() > served.since + _TICKET_WAIT_S]
        for served in (had_time or idle or strangers)[:1]:
            served.idle = False
            served.peer.gives_way = True
            served.peer.stream.interrupt()
            return True
        return False

    def _run(self, group: _Group, target: Callable[[_Served], None], served: _Served) -> None:
        try:
            target(served)
        finally:
            self._forget(group, threading.current_thread(), served)

    def _forget(self, group: _Group, thread: threading.Thread, served: _Served) -> None:
        try:
            served.peer.close()
        finally:
            with self._lock:
                del group[thread]

    def _serve(self, served: _Served) -> None:
        while True:
            report, keeps = serve_put(served.peer, self._book, self._secret, self._limits)
            self._on_end(report)
            _let_go(report.error)
            if not (keeps and self._wait_for_another(served)):
                return

    def _wait_for_another(self, served: _Served) -> bool:
        """Block until another PUT begins; False if the connection has ended or is to end."""
        with self._lock:
            served.idle = True
        try:
            goes_on = served.peer.stream.wait_readable(time.monotonic() + self._limits.keep_s)
        except (OSError, Interrupted):
            return False
        with self._lock:
            # Not idle any more: `_make_room` has ended it, and the peer will come again on another connection.
            goes_on = goes_on and served.idle
            served.idle = False
        return goes_on

    def _refuse(self, served: _Served) -> None:
        error = too_many()
        say_last_word(served.peer.stream, error.http_status, error_body(error), self._limits)


def _let_go(error: BaseException | None) -> None:
    """Clear the frames that an error came through: they hold each other, and with that a peer's mapped pool."""
    while error is not None:
        traceback.clear_frames(error.__traceback__)
        error = error.__cause__ or error.__context__

"""The KV listener of a decode worker: a second port whose bodies go straight into the pool.

Its own threads, not the event loop: a server that hands bodies over piecewise would cost more than the network.
One thread accepts, one thread serves each connection, and their number is bounded.
"""

from __future__ import annotations

import select
import socket
import threading
import time
from collections.abc import Callable

from shared.errors import Unavailable
from shared.kv.book import ReceiveBook
from shared.kv.limits import ReceiveLimits
from shared.kv.stream import Stream
from shared.kv.tcp_put import PutReport, error_body, say_last_word, serve_put

_BACKLOG = 128
_OUT_OF_RESOURCES_WAIT_S = 0.2


class KvListener:
    """Listens from construction on; accepts between `start` and `close`.

    host: a name or address of this host. port: 0 for any free one; `port` tells which.
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
    ) -> None:
        self._book = book
        self._secret = secret
        self._limits = limits
        self._on_end = on_end
        self._lock = threading.Lock()
        self._serving: dict[threading.Thread, Stream] = {}
        self._refusing: dict[threading.Thread, Stream] = {}
        self._closing = threading.Event()
        self._wake_read, self._wake_write = socket.socketpair()
        family, kind, protocol, _, address = socket.getaddrinfo(
            host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE
        )[0]
        self._socket = socket.socket(family, kind, protocol)
        try:
            self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            self._socket.bind(address)
            self._socket.listen(_BACKLOG)
            self._socket.setblocking(False)
        except OSError:
            self._close_sockets()
            raise
        self._acceptor = threading.Thread(target=self._accept, name="kv-accept", daemon=True)

    @property
    def port(self) -> int:
        """The port that it listens on."""
        return int(self._socket.getsockname()[1])

    @property
    def num_connections(self) -> int:
        """Connections being served."""
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
        for stream in threads.values():
            stream.interrupt()
        for thread in threads:
            thread.join(max(0.0, deadline - time.monotonic()))
        self._close_sockets()
        return not any(thread.is_alive() for thread in threads)

    def _close_sockets(self) -> None:
        self._socket.close()
        self._wake_read.close()
        self._wake_write.close()

    def _accept(self) -> None:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        poll.register(self._wake_read, select.POLLIN)
        while True:
            poll.poll()
            if self._closing.is_set():
                return
            try:
                sock, _ = self._socket.accept()
            except (BlockingIOError, ConnectionError):
                continue  # it left before we came
            except OSError:
                # Out of descriptors or memory: the peer stays in the backlog, and poll() would return at once.
                self._closing.wait(_OUT_OF_RESOURCES_WAIT_S)
                continue
            self._take(sock)

    def _take(self, sock: socket.socket) -> None:
        """Serve the connection, or refuse it, on a thread of its own; drop it if even refusals are too many."""
        with self._lock:
            if len(self._serving) < self._limits.max_connections:
                group, target = self._serving, self._serve
            elif len(self._refusing) < self._limits.max_connections:
                group, target = self._refusing, self._refuse
            else:
                sock.close()
                return
            try:
                sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                stream = Stream(sock)
                thread = threading.Thread(
                    target=self._run, args=(group, target, stream), name="kv", daemon=True
                )
                group[thread] = stream
            except OSError:
                sock.close()
                return
        try:
            thread.start()
        except RuntimeError:  # no thread can be had
            self._forget(group, thread, stream)

    def _run(
        self, group: dict[threading.Thread, Stream], target: Callable[[Stream], None], stream: Stream
    ) -> None:
        try:
            target(stream)
        finally:
            self._forget(group, threading.current_thread(), stream)

    def _forget(
        self, group: dict[threading.Thread, Stream], thread: threading.Thread, stream: Stream
    ) -> None:
        stream.close()
        with self._lock:
            del group[thread]

    def _serve(self, stream: Stream) -> None:
        self._on_end(serve_put(stream, self._book, self._secret, self._limits))

    def _refuse(self, stream: Stream) -> None:
        error = Unavailable("too many KV transfers at once", retry_after_s=1.0)
        say_last_word(stream, error.http_status, error_body(error), self._limits)

"""A connection whose blocking calls end on a deadline or when another thread says so.

The socket is non-blocking; a call that cannot go on waits in poll() for the socket and for a wake-up pair. So a
wait costs no CPU, and `interrupt` works in every state: connecting, sending, receiving.
"""

from __future__ import annotations

import array
import contextlib
import errno
import os
import select
import socket
import threading
import time
from collections import deque
from collections.abc import Sequence

Buffer = bytes | memoryview

IOV_MAX = 1024
_READABLE = select.POLLIN | select.POLLHUP | select.POLLERR


class Interrupted(Exception):
    """`interrupt` was called: nothing is left to do but to close, perhaps after `ignore_interrupts`."""


class ReadableWhileSending(Exception):
    """The peer has said something (or hung up) although it has not got everything yet."""


class Stream:
    """Owned by one thread; others may call `interrupt` alone, and even after `close`.

    Deadlines are of time.monotonic(). Raises TimeoutError, Interrupted, and OSError for a broken connection.
    """

    def __init__(self, sock: socket.socket) -> None:
        sock.setblocking(False)
        self._sock = sock
        self._wake_read, self._wake_write = socket.socketpair()
        self._wake_write.setblocking(False)
        self._poll = select.poll()
        self._poll.register(self._wake_read, select.POLLIN)
        self._poll.register(sock, 0)
        self._interrupted = False
        self._deaf = False
        # Held to write to, and to close, the wake-up pair: a closed descriptor is soon somebody else's.
        self._waking = threading.Lock()

    def interrupt(self) -> None:
        """End whatever the owner waits for, now and in future calls. Does not block; may come late or twice."""
        self._interrupted = True
        with self._waking, contextlib.suppress(OSError):
            self._wake_write.send(b"\0")

    def ignore_interrupts(self) -> None:
        """From now on `interrupt` means nothing: let the owner say its last word within a deadline."""
        self._deaf = True
        self._poll.unregister(self._wake_read)

    @property
    def interrupted(self) -> bool:
        """Whether `interrupt` was called: then no call that blocks does its work any more."""
        return self._interrupted

    def check_interrupted(self) -> None:
        """Raise Interrupted if `interrupt` was called."""
        if self._interrupted and not self._deaf:
            raise Interrupted

    def connect(self, address: tuple[object, ...] | str, deadline: float) -> None:
        """Connect the socket. Raises what connect(2) would have reported."""
        code = self._sock.connect_ex(address)
        if code == errno.EINPROGRESS:
            self._wait(select.POLLOUT, deadline)
            code = self._sock.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
        if code:
            raise OSError(code, os.strerror(code))

    def send_all(self, buffers: Sequence[Buffer], deadline: float) -> None:
        """Send every byte of every buffer, none copied.

        Raises ReadableWhileSending when the peer's answer is there before the end.
        """
        left = deque([memoryview(buffer) for buffer in buffers if len(buffer)])
        while left:
            self.check_interrupted()
            try:
                sent = self._sock.sendmsg(list(left)[:IOV_MAX])
            except BlockingIOError:
                if self._wait(select.POLLOUT | select.POLLIN, deadline) & _READABLE:
                    raise ReadableWhileSending from None
                continue
            while sent:
                if sent < len(left[0]):
                    left[0] = left[0][sent:]
                    break
                sent -= len(left.popleft())

    def recv_into(self, buffers: Sequence[memoryview | bytearray], deadline: float) -> int:
        """Read what is there, at least one byte, into the buffers in order; 0 at the end of the stream."""
        while True:
            self.check_interrupted()
            try:
                return self._sock.recvmsg_into(buffers)[0]
            except BlockingIOError:
                self._wait(select.POLLIN, deadline)

    def send_descriptors(self, buffer: Buffer, descriptors: Sequence[int], deadline: float) -> None:
        """Send a buffer, and with its first byte open files. Only over a Unix socket. Raises as `send_all`."""
        content = memoryview(buffer)
        rights = (socket.SOL_SOCKET, socket.SCM_RIGHTS, array.array("i", descriptors))
        while True:
            self.check_interrupted()
            try:
                sent = self._sock.sendmsg([content], [rights])
            except BlockingIOError:
                if self._wait(select.POLLOUT | select.POLLIN, deadline) & _READABLE:
                    raise ReadableWhileSending from None
            else:
                self.send_all([content[sent:]], deadline)
                return

    def recv_descriptors(self, buffer: memoryview, most: int, deadline: float) -> tuple[int, list[int]]:
        """Like `recv_into`; also takes up to `most` open files that came along, which the caller must close."""
        room = socket.CMSG_SPACE(most * array.array("i").itemsize)
        while True:
            self.check_interrupted()
            try:
                num_bytes, messages, _, _ = self._sock.recvmsg_into([buffer], room, socket.MSG_CMSG_CLOEXEC)
            except BlockingIOError:
                self._wait(select.POLLIN, deadline)
                continue
            descriptors = array.array("i")
            for level, kind, content in messages:
                if (level, kind) == (socket.SOL_SOCKET, socket.SCM_RIGHTS):
                    descriptors.frombytes(
                        content[: len(content) // descriptors.itemsize * descriptors.itemsize]
                    )
            return num_bytes, list(descriptors)

    def wait_event(self, descriptor: int, deadline: float) -> None:
        """Block until another descriptor can be read. Raises ReadableWhileSending if the peer speaks first."""
        self._poll.register(descriptor, select.POLLIN)
        try:
            if self._wait(select.POLLIN, deadline, descriptor) & _READABLE:
                raise ReadableWhileSending
        finally:
            self._poll.unregister(descriptor)

    def pause(self, seconds: float) -> None:
        """Wait a moment for something that wakes nobody. Raises ConnectionResetError if the peer has left."""
        time.sleep(seconds)
        self.check_interrupted()
        self._poll.modify(self._sock, select.POLLRDHUP)
        if any(fd == self._sock.fileno() for fd, _ in self._poll.poll(0)):
            raise ConnectionResetError("the peer has left")

    def wait_readable(self, deadline: float) -> bool:
        """Block until the peer speaks (True) or has left (False)."""
        while True:
            self.check_interrupted()
            try:
                return bool(self._sock.recv(1, socket.MSG_PEEK))
            except BlockingIOError:
                self._wait(select.POLLIN, deadline)

    def readable(self) -> bool:
        """Whether `recv_into` would return at once."""
        self._poll.modify(self._sock, select.POLLIN)
        ready = self._poll.poll(0)
        return bool(ready) and self._sock.fileno() in dict(ready)

    def end_sending(self) -> None:
        """Tell the peer that nothing more comes."""
        with contextlib.suppress(OSError):
            self._sock.shutdown(socket.SHUT_WR)

    def drain(self, max_bytes: int, deadline: float) -> None:
        """Read and forget, until the peer is done, the limit or the deadline.

        Closing with unread bytes resets the connection, and then the peer may never see our answer.
        """
        scratch = bytearray(64 * 1024)
        with contextlib.suppress(OSError, Interrupted):
            while max_bytes > 0 and (num_bytes := self.recv_into([scratch], deadline)):
                max_bytes -= num_bytes

    def close(self) -> None:
        """Give the descriptors back."""
        self._sock.close()
        with self._waking:
            self._wake_read.close()
            self._wake_write.close()

    def _wait(self, events: int, deadline: float, other: int = -1) -> int:
        """Block until one of `events` (or an error) is on the socket or `other` is ready; what is on the socket."""
        self._poll.modify(self._sock, events)
        timeout_s = deadline - time.monotonic()
        ready = dict(self._poll.poll(timeout_s * 1000)) if timeout_s > 0 else {}
        self.check_interrupted()
        own = ready.get(self._sock.fileno(), 0)
        if not own and other not in ready:
            raise TimeoutError("the peer did not keep up")
        return own

"""The little HTTP/1.1 that a KV transfer needs: heads by h11; the body never passes through here."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from http import HTTPStatus

import h11

from shared.errors import BackendError, InvalidRequest
from shared.kv.stream import Stream

_HEAD_END = b"\r\n\r\n"
_MAX_RESPONSE_BYTES = 64 * 1024
_READ_BYTES = 4 * 1024

_LINES = re.compile(r"(?:[!-~]+(?: [!-~]+)*\r\n)+\r\n")
# The forms of our own requests and answers, read ten times faster than HTTP in general. Others go to h11.
_OWN_REQUEST = re.compile(r"PUT (/[A-Za-z0-9._/-]*) HTTP/1\.1\r\n((?:[A-Za-z-]+: [!-~]+\r\n)+)\r\n")
_OWN_FIELD = re.compile(r"([A-Za-z-]+): ([!-~]+)\r\n")
_OWN_ANSWER = re.compile(
    rb"HTTP/1\.1 ([2-5][0-9]{2}) [A-Za-z -]+\r\nContent-Type: application/json\r\nContent-Length: ([0-9]{1,5})\r\n"
    rb"Connection: (keep-alive|close)\r\n\r\n(.*)",
    re.DOTALL,
)
_OWN_LENGTH = re.compile(r"[0-9]{1,15}")


@dataclass(frozen=True, slots=True)
class RequestHead:
    """A parsed head. headers: names in lower case; h11 has refused contradictory framing."""

    method: str
    target: str
    headers: Mapping[str, str]
    version: str

    @property
    def keeps(self) -> bool:
        """Whether the client wants to use the connection again. Said explicitly: most clients never would."""
        return self.version >= "1.1" and self.headers.get("connection", "").lower() == "keep-alive"

    @property
    def expects_continue(self) -> bool:
        """Whether the client waits for our word before it sends the body."""
        return self.version >= "1.1" and self.headers.get("expect", "").lower() == "100-continue"


def read_head(
    receive: Callable[[memoryview, float], int], max_bytes: int, deadline: float
) -> tuple[RequestHead, bytes]:
    """Read a request head; also returns what came after it. Raises InvalidRequest, TimeoutError, OSError.

    receive: (buffer, deadline) -> bytes read. Raises ConnectionError if the peer left without a word.
    """
    buffer = bytearray(max_bytes)
    filled = 0
    while True:
        num_bytes = receive(memoryview(buffer)[filled:], deadline)
        end = buffer.find(_HEAD_END, max(0, filled - len(_HEAD_END) + 1), filled + num_bytes)
        filled += num_bytes
        if end >= 0:
            end += len(_HEAD_END)
            return _parse(bytes(buffer[:end])), bytes(buffer[end:filled])
        if not num_bytes:
            raise ConnectionError("the peer left before it had sent a request head")
        if filled == max_bytes:
            raise InvalidRequest(f"the request head is longer than {max_bytes} bytes")


def _parse_own(head: bytes) -> RequestHead | None:
    """A head in the form that `request_head` writes; None for any other, which may be right all the same."""
    request = _OWN_REQUEST.fullmatch(head.decode("latin-1"))
    if request is None:
        return None
    fields = _OWN_FIELD.findall(request[2])
    headers = {name.lower(): value for name, value in fields}
    if len(headers) != len(fields) or not _OWN_LENGTH.fullmatch(headers.get("content-length", "")):
        return None
    if "host" not in headers or "transfer-encoding" in headers:
        return None
    return RequestHead("PUT", request[1], headers, "1.1")


def _parse(head: bytes) -> RequestHead:
    own = _parse_own(head)
    if own is not None:
        return own
    connection = h11.Connection(h11.SERVER, max_incomplete_event_size=len(head))
    try:
        connection.receive_data(head)
        event = connection.next_event()
    except h11.RemoteProtocolError as exc:
        raise InvalidRequest("the request head is not HTTP/1.1") from exc
    if not isinstance(event, h11.Request):
        raise InvalidRequest("the request head is not HTTP/1.1")
    headers = {name.decode("latin-1"): value.decode("latin-1") for name, value in event.headers}
    version = event.http_version.decode("ascii")
    return RequestHead(event.method.decode("ascii"), event.target.decode("ascii"), headers, version)


def request_head(method: str, target: str, headers: Mapping[str, str]) -> bytes:
    """The bytes of a request head. Raises ValueError for what cannot stand in one."""
    lines = [f"{method} {target} HTTP/1.1", *[f"{name}: {value}" for name, value in headers.items()]]
    head = "\r\n".join([*lines, "", ""])
    if head.count("\r\n") != len(lines) + 1 or not _LINES.fullmatch(head):
        raise ValueError("a request head holds visible ASCII alone")
    return head.encode("ascii")


CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"


def json_response(status: int, body: bytes, *, keep: bool = False) -> bytes:
    """A whole response; unless `keep`, it ends the connection."""
    head = (
        f"HTTP/1.1 {status} {HTTPStatus(status).phrase}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(body)}\r\nConnection: {'keep-alive' if keep else 'close'}\r\n\r\n"
    )
    return head.encode("ascii") + body


@dataclass(frozen=True, slots=True)
class Answer:
    """A whole response. keeps: the connection can carry another request."""

    status: int
    body: bytes
    keeps: bool


def read_response(stream: Stream, deadline: float) -> Answer | None:
    """The whole answer to a request whose head was sent; None if the peer left without a word of it.

    A cut answer is no answer. Raises BackendError, TimeoutError, OSError.
    """
    scratch = memoryview(bytearray(_READ_BYTES))
    try:
        num_bytes = stream.recv_into([scratch], deadline)
    except ConnectionResetError:
        return None
    if not num_bytes:
        return None
    early = bytes(scratch[:num_bytes])
    own = _OWN_ANSWER.fullmatch(early)
    if own is not None and len(own[4]) == int(own[2]):
        return Answer(int(own[1]), own[4], own[3] == b"keep-alive")
    return _read_any_response(stream, early, deadline)


def _read_any_response(stream: Stream, early: bytes, deadline: float) -> Answer:
    """What does not come from a decode worker of ours, or not all at once."""
    connection = h11.Connection(h11.CLIENT)
    connection.send(h11.Request(method="PUT", target="/", headers=[("Host", "-"), ("Content-Length", "1")]))
    scratch = memoryview(bytearray(_READ_BYTES))
    status, body, keeps = 0, b"", False
    try:
        connection.receive_data(early)
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA:
                num_bytes = stream.recv_into([scratch], deadline)
                connection.receive_data(bytes(scratch[:num_bytes]))
            elif isinstance(event, h11.Response):
                status = event.status_code
                keeps = (b"connection", b"keep-alive") in list(event.headers)
            elif isinstance(event, h11.Data):
                body += event.data
                if len(body) > _MAX_RESPONSE_BYTES:
                    raise BackendError("the decode worker's answer is too long")
            elif isinstance(event, h11.EndOfMessage):
                return Answer(status, body, keeps)
            elif isinstance(event, h11.ConnectionClosed):
                raise BackendError("the decode worker hung up without an answer")
    except h11.RemoteProtocolError as exc:
        raise BackendError("the decode worker's answer is not HTTP/1.1, or was cut") from exc

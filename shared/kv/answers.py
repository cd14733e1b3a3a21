"""What a PUT of KV is answered: status and JSON for every ending, and how they reach a peer that may still send."""

from __future__ import annotations

import contextlib
import time
from http import HTTPStatus

import orjson

from shared.errors import InvalidRequest, ServingError, Unavailable
from shared.kv.book import Received
from shared.kv.http_head import json_response
from shared.kv.limits import ReceiveLimits
from shared.kv.stream import Interrupted, ReadableWhileSending, Stream
from shared.wire import ErrorBody


class NotAPut(Exception):
    """A request that is no PUT of KV in form or in time."""

    def __init__(self, status: HTTPStatus, message: str) -> None:
        super().__init__(message)
        self.status = status


def answer_of(received: Received | None, error: Exception | None) -> tuple[int, bytes]:
    """Status and JSON for an ending; status 0 when nobody is there to read it."""
    match error:
        case None:
            assert received is not None
            return 200, orjson.dumps({"kv_bytes": received.kv_bytes, "wire_bytes": received.wire_bytes})
        case ServingError():
            return error.http_status, error_body(error)
        case NotAPut():
            return error.status, ErrorBody(code=InvalidRequest.code, message=str(error)).to_json()
        case Interrupted():
            return Unavailable.http_status, error_body(Unavailable("this worker is stopping"))
        case ConnectionError():
            return 0, b""
        case _:
            return 500, error_body(ServingError("the decode worker failed"))


def too_many() -> Unavailable:
    """What is said to a connection for which there is no place."""
    return Unavailable("too many KV transfers at once", retry_after_s=1.0)


def error_body(error: ServingError) -> bytes:
    """A ServingError as it travels."""
    return ErrorBody(
        code=error.code, message=error.message, param=error.param, retry_after_s=error.retry_after_s
    ).to_json()


def say_and_keep(stream: Stream, status: int, body: bytes, limits: ReceiveLimits) -> bool:
    """Answer and leave the connection as it is; False if that did not work."""
    try:
        stream.send_all([json_response(status, body, keep=True)], time.monotonic() + limits.answer_s)
    except (OSError, Interrupted, ReadableWhileSending):
        return False
    return True


def say_last_word(stream: Stream, status: int, body: bytes, limits: ReceiveLimits) -> None:
    """Answer, and read on for a little while if this is a refusal, so that the answer is not lost to a reset."""
    deadline = time.monotonic() + limits.answer_s
    stream.ignore_interrupts()
    with contextlib.suppress(OSError, ReadableWhileSending):
        stream.send_all([json_response(status, body)], deadline)
        stream.end_sending()
        if status != HTTPStatus.OK:
            stream.drain(limits.drain_bytes, deadline)

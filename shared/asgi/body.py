"""Reading a request's body with a limit on its size and its time, and parsing it as JSON.

The Content-Type is not looked at: `curl -d` and many small clients send JSON under another type, and a body
that does not parse is refused anyway. Compressed bodies are refused, so nothing can unfold in memory.
A body that is too slow is a 400, not a 408: clients repeat a 408 by themselves, and it would be slow again.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import TypeVar

import jiter
from pydantic import BaseModel
from starlette.requests import Request

from shared.asgi.context import note_unread_body
from shared.asgi.text import clipped
from shared.asgi.validation import validated
from shared.errors import InvalidRequest, TooLarge

M = TypeVar("M", bound=BaseModel)
LINGER_S = 2.0


async def read_body(request: Request, *, limit_bytes: int, timeout_s: float) -> bytes:
    """The whole body.

    Raises TooLarge beyond `limit_bytes` (announced or real), InvalidRequest if it takes longer than
    `timeout_s` or is compressed, and starlette's ClientDisconnect if the sender leaves.
    """
    encoding = request.headers.get("content-encoding", "identity").strip().lower()
    if encoding not in ("", "identity"):
        raise InvalidRequest("Compressed request bodies are not supported; send the body without encoding.")
    too_large = TooLarge(f"The request body is larger than the limit of {limit_bytes} bytes.")
    if int(request.headers.get("content-length", "0")) > limit_bytes:
        # Who waits for "100 Continue" has sent nothing, and reading would invite it.
        if request.headers.get("expect", "").lower() != "100-continue":
            await _linger(request.stream())
        note_unread_body(request.scope)
        raise too_large
    chunks: list[bytes] = []
    size = 0
    stream = request.stream()
    try:
        async with asyncio.timeout(timeout_s):
            async for chunk in stream:
                size += len(chunk)
                if size > limit_bytes:
                    break
                chunks.append(chunk)
    except TimeoutError as exc:
        note_unread_body(request.scope)
        raise InvalidRequest(f"The request body did not arrive within {timeout_s:g} seconds.") from exc
    if size > limit_bytes:
        chunks.clear()
        await _linger(stream)
        note_unread_body(request.scope)
        raise too_large
    return b"".join(chunks)


def parse_json(body: bytes, model: type[M]) -> M:
    """`body` as a valid `model`.

    Raises InvalidRequest, with the field at fault in `param`. NaN, infinities, duplicate keys, lone
    surrogates and nesting beyond 200 levels are no JSON here.
    """
    return validated(parse_object(body), model)


def parse_object(body: bytes) -> dict[str, object]:
    """`body` as a JSON object, not validated further. Raises InvalidRequest."""
    if not body.strip():
        raise InvalidRequest("The request body is empty; a JSON object is expected.")
    try:
        payload = jiter.from_json(body, allow_inf_nan=False, catch_duplicate_keys=True)
    except ValueError as exc:
        raise InvalidRequest(f"The request body is not valid JSON: {clipped(str(exc), 100)}.") from exc
    if not isinstance(payload, dict):
        raise InvalidRequest("The request body must be a JSON object.")
    return payload


async def _linger(stream: AsyncIterator[bytes]) -> None:
    """Take and drop what is still being sent, for a moment.

    Closing a socket that holds unread bytes resets it, and the sender may lose the answer that says why.
    """
    try:
        async with asyncio.timeout(LINGER_S):
            async for _ in stream:
                pass
    except TimeoutError:
        return

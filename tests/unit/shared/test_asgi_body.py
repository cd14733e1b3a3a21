"""Bodies: bounded in size and time, JSON or a clean 400."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from typing import Any, Literal

import pytest
from fastapi import FastAPI, Request
from pydantic import BaseModel, Field, field_validator

from shared.asgi.body import parse_json, read_body
from shared.asgi.install import install_http
from shared.errors import InvalidRequest
from tests.support.servers import ServerThread, connect, read_until, send_request

LIMIT_BYTES = 200_000


class Message(BaseModel):
    """One turn of a chat."""

    role: Literal["user", "system"]
    content: str | list[dict[str, str]]


class Body(BaseModel):
    """Unions, lists, bounds and a validator of our own, as in the OpenAI bodies."""

    model: str
    prompt: str | list[str] | list[int] | None = None
    temperature: float = Field(default=1.0, ge=0, le=2, allow_inf_nan=False)
    messages: list[Message] = []
    n: int = 1

    @field_validator("n")
    @classmethod
    def _even(cls, n: int) -> int:
        if n % 2 == 0:
            raise ValueError("must be odd.")
        return n


def _error(raw: bytes) -> InvalidRequest:
    with pytest.raises(InvalidRequest) as caught:
        parse_json(raw, Body)
    return caught.value


def test_a_valid_body_is_parsed() -> None:
    """Non-ASCII text and numbers arrive as they were written."""
    body = parse_json('{"model":"m","prompt":"你好 😀","temperature":0.5}'.encode(), Body)
    assert ("m", "你好 😀", 0.5) == (body.model, body.prompt, body.temperature)


@pytest.mark.parametrize(
    "raw",
    [
        b"",
        b" \n",
        b"{",
        b"[]",
        b"1",
        b"null",
        b'"text"',
        b'{"model":"m"} x',
        b'{"model":"m","temperature":NaN}',
        b'{"model":"m","temperature":Infinity}',
        b'{"model":"m","temperature":1e999}',
        b'{"model":"m","model":"n"}',
        b'{"model":"\\ud800"}',
        b'{"model":"\xff"}',
        b'{"model":' + b"9" * 10_000 + b"}",
        b'{"model":' + b"[" * 100_000,
        b'{"a":' * 100_000,
        b"\x00\x01\x02",
        b"\x1f\x8b\x08",
        b"model=m",
    ],
    ids=lambda raw: repr(raw[:30]),
)
def test_what_is_no_proper_json_object_is_a_clean_400(raw: bytes) -> None:
    """One short sentence, whatever was sent."""
    exc = _error(raw)
    assert 400 == exc.http_status
    assert len(exc.message) < 250
    assert "\n" not in exc.message


@pytest.mark.parametrize(
    ("raw", "param", "words"),
    [
        (b"{}", "model", "is required"),
        (b'{"model":7}', "model", "valid string"),
        (b'{"model":"m","temperature":3}', "temperature", "less than or equal to 2"),
        (b'{"model":"m","prompt":["a",3]}', "prompt.1", "valid string"),
        (b'{"model":"m","prompt":{"a":3}}', "prompt", "valid string"),
        (
            b'{"model":"m","messages":[{"role":"user","content":"x"},{"role":"user"}]}',
            "messages.1.content",
            "req",
        ),
        (b'{"model":"m","messages":[{"role":"bot","content":"x"}]}', "messages.0.role", "'user' or 'system'"),
        (b'{"model":"m","n":2}', "n", "must be odd"),
    ],
)
def test_the_field_at_fault_is_named(raw: bytes, param: str, words: str) -> None:
    """`param` is a dotted path through the body, without pydantic's own steps, and the text is a sentence."""
    exc = _error(raw)
    assert param == exc.param
    assert words in exc.message
    assert param in exc.message
    assert exc.message.endswith(".")
    assert not exc.message.endswith("..")
    for repr_of_pydantic in ("type=", "input_value", "pydantic", "Value error", "validation error", "\n"):
        assert repr_of_pydantic not in exc.message


def test_a_bad_value_is_not_echoed() -> None:
    """Prompts must not turn up in error texts, which clients log."""
    assert "secret" not in _error(b'{"model":"m","temperature":"secret"}').message


def test_a_long_name_is_cut() -> None:
    """A name of the sender's choice is input too."""

    class Strict(BaseModel, extra="forbid"):
        pass

    with pytest.raises(InvalidRequest) as caught:
        parse_json(b'{"' + b"x" * 5000 + b'":1}', Strict)
    assert "is not a known field" in caught.value.message
    assert len(caught.value.message) < 150
    assert len(caught.value.param or "") <= 100


def _app() -> FastAPI:
    app = FastAPI()
    install_http(app, keys=(), trust_caller_id=False)

    @app.post("/size")
    async def size(request: Request) -> dict[str, int]:
        return {"size": len(await read_body(request, limit_bytes=LIMIT_BYTES, timeout_s=10))}

    @app.post("/hasty")
    async def hasty(request: Request) -> dict[str, int]:
        return {"size": len(await read_body(request, limit_bytes=LIMIT_BYTES, timeout_s=0.05))}

    return app


@pytest.fixture(scope="module")
def server() -> Iterator[ServerThread]:
    """One server for all tests here; it holds no state."""
    with ServerThread(_app()) as running:
        yield running


@pytest.mark.parametrize("length", [0, 1, 65_536, LIMIT_BYTES])
def test_bodies_up_to_the_limit_are_read_whole(server: ServerThread, length: int) -> None:
    """With any content type."""
    answer = server.http.post("/size", content=b"x" * length, headers={"content-type": "text/plain"})
    assert (200, {"size": length}) == (answer.status_code, answer.json())


@pytest.mark.parametrize("length", [LIMIT_BYTES + 1, 20_000_000])
@pytest.mark.parametrize("chunked", [False, True])
def test_a_body_beyond_the_limit_is_413(server: ServerThread, length: int, chunked: bool) -> None:
    """Announced or not, also for a client that reads the answer only after all is sent."""
    content: Any = (b"x" * 10_000 for _ in range(-(-length // 10_000))) if chunked else b"x" * length
    answer = server.http.post("/size", content=content)
    assert 413 == answer.status_code
    assert "request_too_large" == answer.json()["error"]["code"]
    assert "close" == answer.headers["connection"]


def test_a_sender_that_waits_for_100_continue_never_sends_the_body(server: ServerThread) -> None:
    """The announced length is enough to refuse."""
    with connect(server) as sock:
        headers = {"Content-Length": "10000000000", "Expect": "100-continue"}
        send_request(sock, "POST", "/size", headers=headers)
        answer = read_until(sock, b"request_too_large")
    assert answer.startswith(b"HTTP/1.1 413 ")


def test_a_slow_body_is_given_up(server: ServerThread) -> None:
    """The rest is not waited for: 400, and the connection is closed."""
    with connect(server) as sock:
        send_request(sock, "POST", "/hasty", headers={"Content-Length": "10"}, body=b"abc")
        answer = read_until(sock, b"nothing but the end")
    assert answer.startswith(b"HTTP/1.1 400 ")
    assert b"connection: close" in answer
    assert b"did not arrive within 0.05 seconds" in answer


def test_compressed_bodies_are_refused(server: ServerThread) -> None:
    """Nothing unfolds in memory."""
    answer = server.http.post("/size", content=b"x", headers={"content-encoding": "gzip"})
    assert 400 == answer.status_code


def test_a_sender_that_leaves_in_the_body_harms_nobody(server: ServerThread) -> None:
    """The next request is served."""
    with connect(server) as sock:
        send_request(sock, "POST", "/size", headers={"Content-Length": "100"}, body=b"abc")
        sock.shutdown(socket.SHUT_RDWR)
    assert 200 == server.http.post("/size", content=b"").status_code

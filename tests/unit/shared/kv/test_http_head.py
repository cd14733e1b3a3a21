"""Request heads as we write them."""

from __future__ import annotations

import pytest

from shared.kv.http_head import read_head, request_head

HEAD = {"Host": "handoff-decode", "Content-Length": "12", "X-Handoff-Ticket": "a.b"}


def test_a_head_is_read_as_it_was_written() -> None:
    """And what came with it is handed on."""
    content = request_head("PUT", "/v1/kv/one", HEAD) + b"early"

    def receive(buffer: memoryview, _: float) -> int:
        buffer[: len(content)] = content
        return len(content)

    head, early = read_head(receive, 1024, deadline=0.0)
    assert ("PUT", "/v1/kv/one", b"early") == (head.method, head.target, early)
    assert {name.lower(): value for name, value in HEAD.items()} == head.headers


@pytest.mark.parametrize("value", ["x\r\nY: z", "x\n", "\0", "\x7f", "x  y", "ä", "\u2028"])
@pytest.mark.parametrize("where", ["target", "name", "value"])
def test_nothing_ends_a_line_of_a_head(value: str, where: str) -> None:
    """Whatever asks for it: no field that nobody wrote."""
    target = f"/v1/kv/{value}" if where == "target" else "/v1/kv/one"
    field = {value: "x"} if where == "name" else {"X-Request-Id": value if where == "value" else "x"}
    with pytest.raises(ValueError, match="visible ASCII"):
        request_head("PUT", target, HEAD | field)

"""The benchmarks' client cuts an answer at its line ends, wherever the parts that it came in end."""

from __future__ import annotations

import pytest
from fastapi import FastAPI
from starlette.responses import StreamingResponse

from services.cli.bench_client import BenchClient
from services.cli.bench_stack import StackFailed
from tests.support.servers import ServerThread


def app_of(*parts: bytes) -> FastAPI:
    """Answers with these parts, each a chunk of its own."""
    app = FastAPI()

    @app.post("/")
    async def answer() -> StreamingResponse:
        return StreamingResponse(iter(parts))

    return app


async def lines_of(server: ServerThread) -> list[bytes]:
    """All that one answer has."""
    found: list[bytes] = []
    with BenchClient("secret", [server.url]) as client:
        async with client.post(server.url, "/", b"{}") as answer:
            while lines := await answer.lines():
                found += lines
    return found


@pytest.mark.parametrize("step", [1, 2, 5, 100])
async def test_lines_come_whole(step: int) -> None:
    """A token whose event lay in two parts was once not counted."""
    whole = b'{"text":"a"}\n\n{"text":""}\n'
    with ServerThread(app_of(*(whole[i : i + step] for i in range(0, len(whole), step)))) as server:
        assert [b'{"text":"a"}', b"", b'{"text":""}'] == await lines_of(server)


async def test_an_answer_that_ends_within_a_line_is_a_failure() -> None:
    """Its last line was never told to be whole."""
    with ServerThread(app_of(b"a\n", b"b")) as server, pytest.raises(StackFailed, match="within a line"):
        await lines_of(server)

"""The client over real sockets: whole streams succeed, and every way to fail has its own name."""

from __future__ import annotations

import asyncio
import socket
from itertools import islice
from typing import Any

import httpx
import pytest

from loadtest.client import LoadClient, Request
from loadtest.drive import closed_loop, open_loop
from loadtest.metrics import RequestRecord
from loadtest.workload import Timed, synthetic
from tests.support.fake_openai import STAGES_MS, Answer, Script, event, fake_openai, good, whole_stream

REQUEST = Request((1, 2, 3), 4)


async def send(script: Script, request: Request = REQUEST, **options: Any) -> RequestRecord:
    """One request to a server that runs this script."""
    with fake_openai(script) as fake:
        async with LoadClient(fake.base_url, **options) as client:
            return await client.send(request)


async def test_a_good_stream() -> None:
    """Counts, order of times, the stages of the last comment over those of the headers, and facts of both."""
    record = await send(good)
    assert record.failure is None
    assert (record.prompt_tokens, record.output_tokens, record.text) == (3, 4, "w0 w1 w2 w3 ")
    assert record.ttft_s is not None
    assert record.e2el_s is not None
    assert 0 < record.ttft_s <= record.e2el_s <= record.ended_s - record.started_s
    assert sum(record.itl_s) == pytest.approx(record.e2el_s - record.ttft_s, abs=1e-3)
    stages_ms = {stage: value_s * 1000 for stage, value_s in record.timing.stages_s.items()}
    assert stages_ms == pytest.approx({**STAGES_MS, "total": 55.0})
    assert record.timing.facts["topology"] == "pd"
    assert record.timing.number("kv_bytes") == 4096


async def test_what_is_sent() -> None:
    """Greedy, streamed, of fixed length, with usage; the model is asked for once; extra fields win."""
    with fake_openai() as fake:
        async with LoadClient(fake.base_url) as client:
            await client.send(REQUEST)
            await client.send(Request("hello", 2, chat=True, extra={"temperature": 1}))
    completion, chat = fake.bodies
    assert completion == {
        "model": "tiny",
        "prompt": [1, 2, 3],
        "max_tokens": 4,
        "temperature": 0,
        "ignore_eos": True,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    assert chat["messages"] == [{"role": "user", "content": "hello"}]
    assert chat["temperature"] == 1


async def test_bytes_one_at_a_time() -> None:
    """A stream in single bytes measures the same texts."""

    def script(path: str, body: dict[str, Any]) -> Answer:
        whole = b"".join(whole_stream(path, body))
        return Answer(tuple(bytes([byte]) for byte in whole))

    record = await send(script, Request("hello", 2, chat=True))
    assert (record.failure, record.text, record.output_tokens) == (None, "w0 w1 ", 2)


@pytest.mark.parametrize(
    ("kind", "answer"),
    [
        ("status_429", Answer((b'{"error": {"message": "busy"}}',), status=429)),
        ("status_500", Answer((b"not json",), status=500)),
        ("error_event_engine_fault", Answer((event({"error": {"code": "engine_fault", "message": "x"}}),))),
        ("cut_stream", Answer((event({"choices": [{"text": "a"}]}),))),
        ("cut_stream", Answer((event({"choices": [{"text": "a"}]}),), cut=True)),
        ("cut_stream", Answer((), cut=True)),
        ("malformed_stream", Answer((b"data: {\n\n",))),
    ],
)
async def test_failures_have_their_kind(kind: str, answer: Answer) -> None:
    """A refusal, an error event, a hang-up and a damaged stream are told apart, and none is a success."""
    record = await send(lambda _path, _body: answer)
    assert record.failure is not None
    assert kind == record.failure.kind


async def test_nobody_listens() -> None:
    """A refused connection is a failed request, not an exception."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    async with LoadClient(f"http://127.0.0.1:{port}", model="m") as client:
        record = await client.send(REQUEST)
    assert record.failure is not None
    assert record.failure.kind == "connect"


async def test_silence_is_a_timeout() -> None:
    """A server that accepts and says nothing is given up after timeout_s."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        async with LoadClient(
            f"http://127.0.0.1:{server.getsockname()[1]}", model="m", timeout_s=0.05
        ) as client:
            record = await client.send(REQUEST)
    assert record.failure is not None
    assert record.failure.kind == "timeout"


async def test_closed_loop_keeps_its_concurrency() -> None:
    """Exactly `concurrency` requests are open at a time, never more, and all are sent."""
    gate, open_now, most = asyncio.Event(), 0, 0

    class Watched(LoadClient):
        async def send(self, request: Request, *, planned_s: float | None = None) -> RequestRecord:
            nonlocal open_now, most
            open_now += 1
            most = max(most, open_now)
            if open_now == 3:
                gate.set()
            await gate.wait()
            record = await super().send(request, planned_s=planned_s)
            open_now -= 1
            return record

    with fake_openai() as fake:
        async with Watched(fake.base_url) as client:
            requests = islice(synthetic(prompt_tokens=4, max_tokens=2), 8)
            records = await closed_loop(client, requests, concurrency=3)
    assert (len(records), most) == (8, 3)


async def test_open_loop_does_not_wait_for_answers() -> None:
    """Two requests that are due together are both open at once; lateness is measured from the due time."""
    with fake_openai() as fake:
        async with LoadClient(fake.base_url) as client:
            requests = [Timed(0.0, REQUEST), Timed(0.0, REQUEST), Timed(0.02, REQUEST)]
            records = await open_loop(client, requests)
    assert [record.failure for record in records] == [None, None, None]
    assert all(record.late_s >= 0 for record in records)
    due_s = [record.started_s - record.late_s for record in records]
    assert 0.02 == pytest.approx(due_s[2] - due_s[0])


async def test_a_given_model_is_not_asked_for() -> None:
    """Without a name, and without a server to tell one, nothing can be sent: that is no measurement."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        base_url = f"http://127.0.0.1:{server.getsockname()[1]}"
    async with LoadClient(base_url, model="given") as client:
        assert await client.model() == "given"
    async with LoadClient(base_url) as client:
        with pytest.raises(httpx.ConnectError):
            await client.send(REQUEST)

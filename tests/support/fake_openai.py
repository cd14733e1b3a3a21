"""A server that speaks just enough of the OpenAI API, on a real socket, and says exactly the bytes a test
wants.

It runs in a thread of its own, so that asyncio tests and subprocesses meet it alike.
"""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from typing import Any

STAGES_MS = {
    "route": 0.5,
    "reserve": 1.0,
    "queue": 0.25,
    "prefill": 20.0,
    "transfer": 2.0,
    "decode_queue": 0.25,
    "decode": 30.0,
}
FACTS = {"topology": "pd", "transport": "tcp", "kv_bytes": 4096, "wire_bytes": 5000, "retries": 0}
HEADERS = (("Server-Timing", "route;dur=0.500, reserve;dur=1.000"), ("X-Handoff-Topology", "pd"))


@dataclass(frozen=True)
class Answer:
    """What to reply: the parts go out one write each. cut: hang up after them, without ending the body."""

    parts: tuple[bytes, ...]
    status: int = 200
    headers: tuple[tuple[str, str], ...] = HEADERS
    cut: bool = False


@dataclass
class FakeOpenAI:
    """The running server: where it is, and what it was asked for."""

    base_url: str
    bodies: list[dict[str, Any]] = field(default_factory=list)


Script = Callable[[str, dict[str, Any]], Answer]


def event(content: object) -> bytes:
    """One SSE event."""
    return f"data: {content if isinstance(content, str) else json.dumps(content)}\n\n".encode()


def whole_stream(
    path: str,
    body: Mapping[str, Any],
    *,
    stages_ms: Mapping[str, float] | None = None,
    facts: Mapping[str, object] | None = None,
) -> tuple[bytes, ...]:
    """A good stream of `max_tokens` tokens with usage, the closing timing comment, and [DONE].

    stages_ms: without the total. facts: laid over those of a PD request.
    """
    num_tokens = body["max_tokens"]
    prompt_tokens = len(body["prompt"]) if "prompt" in body else 7
    parts: list[bytes] = []
    for number in range(num_tokens):
        finish_reason = "length" if number == num_tokens - 1 else None
        piece = (
            {"delta": {"content": f"w{number} "}}
            if path.endswith("chat/completions")
            else {"text": f"w{number} "}
        )
        parts.append(event({"choices": [{"index": 0, **piece, "finish_reason": finish_reason}]}))
    usage = {"prompt_tokens": prompt_tokens, "completion_tokens": num_tokens}
    parts.append(event({"choices": [], "usage": usage}))
    times = dict(STAGES_MS if stages_ms is None else stages_ms)
    told = {"stages_ms": {**times, "total": sum(times.values()) + 1.0}, **FACTS, **(facts or {})}
    parts.append(f": server-timing {json.dumps(told)}\n\n".encode())
    parts.append(event("[DONE]"))
    return tuple(parts)


def good(path: str, body: dict[str, Any]) -> Answer:
    """The script of a server without faults."""
    return Answer(whole_stream(path, body))


@contextmanager
def fake_openai(script: Script = good) -> Iterator[FakeOpenAI]:
    """Run a server whose answer to each POST is `script(path, body)`."""
    loop = asyncio.new_event_loop()
    thread = threading.Thread(target=loop.run_forever, name="fake-openai")
    thread.start()
    fake = FakeOpenAI("")

    async def open_server() -> asyncio.Server:
        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            try:
                with suppress(ConnectionError, asyncio.IncompleteReadError):
                    while await _one_exchange(reader, writer, script, fake):
                        pass
            finally:
                writer.close()
                with suppress(ConnectionError):
                    await writer.wait_closed()

        return await asyncio.start_server(serve, "127.0.0.1", 0)

    async def close_server(server: asyncio.Server) -> None:
        server.close()
        tasks = [task for task in asyncio.all_tasks() if task is not asyncio.current_task()]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    server = asyncio.run_coroutine_threadsafe(open_server(), loop).result()
    fake.base_url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield fake
    finally:
        asyncio.run_coroutine_threadsafe(close_server(server), loop).result()
        loop.call_soon_threadsafe(loop.stop)
        thread.join()
        loop.close()


async def _one_exchange(
    reader: asyncio.StreamReader, writer: asyncio.StreamWriter, script: Script, fake: FakeOpenAI
) -> bool:
    """Answer one request; False when the connection is over."""
    head = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1")
    request_line, *lines = head.split("\r\n")
    method, path, _ = request_line.split(" ")
    length = next((int(x.split(":")[1]) for x in lines if x.lower().startswith("content-length:")), 0)
    raw = await reader.readexactly(length)
    if method == "GET":
        answer = Answer((json.dumps({"data": [{"id": "tiny"}]}).encode(),), headers=())
    else:
        body = json.loads(raw)
        fake.bodies.append(body)
        answer = script(path, body)
    kind = "text/event-stream" if method == "POST" and answer.status == 200 else "application/json"
    fields = [("Content-Type", kind), ("Transfer-Encoding", "chunked"), *answer.headers]
    writer.write(
        f"HTTP/1.1 {answer.status} X\r\n".encode()
        + b"".join(f"{n}: {v}\r\n".encode() for n, v in fields)
        + b"\r\n"
    )
    for part in answer.parts:
        writer.write(b"%x\r\n%b\r\n" % (len(part), part))
        await writer.drain()
        await asyncio.sleep(0)
    if answer.cut:
        return False
    writer.write(b"0\r\n\r\n")
    await writer.drain()
    return True

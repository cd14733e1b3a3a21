"""A peer that knows the KV port and holds a ticket, but sends something else than was reserved.

Over real sockets, to a real decode worker: each attack has its status, writes nothing before it is refused, leaves
no block behind, and the worker serves the next hand-off.
"""

from __future__ import annotations

import json
import socket
import struct
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from shared.kv.manifest import Expected
from shared.kv.shape import KINDS
from shared.kv.ticket import KV_PATH, TICKET_HEADER, Ticket
from shared.wire import DecodeEvent, DecodeRequest, Handoff, Sampling
from tests.support.cluster import AUTH, SECRET, RunningWorker, run_worker, wait_until
from tests.support.completions import random_prompt
from tests.support.handoffs import expected_by
from tests.unit.shared.kv.blobs import Pool, encode, manifest_for

PROMPT = random_prompt(40, seed=1)
WORK: dict[str, Any] = {
    "request_id": "hostile",
    "token_ids": PROMPT,
    "num_prompt_tokens": len(PROMPT),
    "sampling": Sampling(temperature=0, max_tokens=3, ignore_eos=True),
    "timeout_s": 60,
}
Fields = dict[str, Any]


@pytest.fixture(scope="module")
def decode(tiny_model: Path) -> Iterator[RunningWorker]:
    """A decode worker alone."""
    with run_worker("decode", tiny_model) as running:
        yield running


class Reserved:
    """A reservation of the worker, and the blob that it waits for."""

    def __init__(self, running: RunningWorker, handoff: Handoff) -> None:
        self.handoff = handoff
        self.want = expected_by(running, PROMPT, handoff)
        self.blob = self.blob_of(self.want)

    def blob_of(self, want: Expected) -> bytes:
        """The blob of a sender that means this."""
        pool, rng = Pool(want.shape, num_tokens=want.num_tokens), np.random.default_rng(3)
        for buffer in pool.buffers.values():
            numbers = np.frombuffer(buffer, dtype=np.float32)
            numbers[:] = rng.normal(size=len(numbers))
        return encode(manifest_for(want, chunk_size=16), pool)

    def put(self, blob: bytes, *, ticket: str | None = None, length: int | None = None) -> int:
        """The status of one PUT. length: what it claims to have, if that is not so."""
        address = httpx.URL(self.handoff.kv_url)
        lines = [
            f"PUT {KV_PATH}{self.handoff.handoff_id} HTTP/1.1",
            "Host: decode",
            f"Content-Length: {length or len(blob)}",
            f"{TICKET_HEADER}: {self.handoff.ticket if ticket is None else ticket}",
        ]
        with socket.create_connection((address.host, address.port or 80), timeout=20) as sock:
            sock.sendall("\r\n".join(lines).encode() + b"\r\n\r\n" + blob)
            sock.shutdown(socket.SHUT_WR)
            answer = b""
            while data := sock.recv(65536):
                answer += data
        return int(answer.split()[1])


@contextmanager
def reservation(running: RunningWorker, lines: list[str] | None = None) -> Iterator[Reserved]:
    """Held for as long as the context; what the worker says after it goes to `lines`."""
    body = DecodeRequest(**WORK).to_json()
    with httpx.stream("POST", f"{running.url}/v1/decode", content=body, headers=AUTH, timeout=30) as stream:
        said = stream.iter_lines()
        handoff = DecodeEvent.model_validate_json(next(said)).reserved
        assert handoff is not None
        yield Reserved(running, handoff)
        if lines is not None:
            lines += said


def pool_bytes(running: RunningWorker) -> bytes:
    """All KV of the worker."""
    worker = running.worker
    views = worker.kv_source(range(worker.pool.num_blocks))
    size = worker.pool.num_blocks * worker.pool.block_size
    layers = range(worker.kv_shape.num_layers)
    return b"".join(bytes(v) for layer in layers for kind in KINDS for v in views.views(layer, kind, 0, size))


def assert_alive(running: RunningWorker) -> None:
    """Nothing is held, and the next hand-off gets its answer."""
    wait_until(lambda: running.worker.engine.num_groups == 0)
    counts = running.worker.pool.counts()
    assert (0, 0, 0) == (counts.live, counts.promised, counts.leaked)
    lines: list[str] = []
    with reservation(running, lines) as reserved:
        assert 200 == reserved.put(reserved.blob)
    assert "finish" in json.loads(lines[-1])


def rewritten(blob: bytes, change: Callable[[Fields], object]) -> bytes:
    """With another header."""
    end = 8 + struct.unpack("<Q", blob[:8])[0]
    fields = json.loads(blob[8:end])
    change(fields)
    content = json.dumps(fields).encode()
    return struct.pack("<Q", len(content)) + content + blob[end:]


def twice(blob: bytes) -> bytes:
    """With a tensor that is listed twice."""
    end = 8 + struct.unpack("<Q", blob[:8])[0]
    content = blob[8:end].rstrip()
    again = json.dumps(json.loads(content)["chunk.0000.layer.00.k"])
    content = content[:-1] + f',"chunk.0000.layer.00.k":{again}}}'.encode()
    return struct.pack("<Q", len(content)) + content + blob[end:]


ATTACKS: dict[str, tuple[Callable[[Reserved], bytes], int]] = {
    "longer than its manifest": (lambda r: r.blob + bytes(8), 409),
    "shorter than any blob": (lambda r: r.blob[:100], 409),
    "a huge header": (lambda r: struct.pack("<Q", 2**62) + r.blob[8:], 400),
    "no JSON": (lambda r: r.blob[:8] + b"}" * (len(r.blob) - 8), 400),
    "a tensor twice": (lambda r: twice(r.blob), 409),
    "a tensor of another dtype": (
        lambda r: rewritten(r.blob, lambda f: f["chunk.0000.layer.00.k"].update(dtype="BF16")),
        409,
    ),
    "another model": (lambda r: r.blob_of(replace(r.want, fingerprint="0" * 32)), 409),
    "another prompt": (lambda r: r.blob_of(replace(r.want, token_hash="0" * 32)), 409),
    "another epoch": (lambda r: r.blob_of(replace(r.want, epoch=r.want.epoch + 1)), 409),
    "another hand-off": (lambda r: r.blob_of(replace(r.want, handoff_id="kv-other")), 409),
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_foreign_blob_is_refused_before_it_is_written(decode: RunningWorker, attack: str) -> None:
    """The pool does not change by a byte, and the reservation can still be filled by somebody honest."""
    make, status = ATTACKS[attack]
    lines: list[str] = []
    with reservation(decode, lines) as reserved:
        before = pool_bytes(decode)
        assert status == reserved.put(make(reserved))
        assert before == pool_bytes(decode)
        assert 200 == reserved.put(reserved.blob)
    assert "finish" in json.loads(lines[-1])
    assert_alive(decode)


def test_a_length_beyond_any_blob_is_refused_unread(decode: RunningWorker) -> None:
    """413 for what no reservation of this prompt can need."""
    with reservation(decode) as reserved:
        before = pool_bytes(decode)
        assert 413 == reserved.put(reserved.blob, length=1 << 40)
        assert before == pool_bytes(decode)
    assert_alive(decode)


def test_damage_and_truncation_are_found_wherever_they_are(decode: RunningWorker) -> None:
    """A flipped bit is 422 from the first byte of KV to the last one, a cut body 400; neither is ever decoded."""
    with reservation(decode) as reserved:
        blob = reserved.blob
        header_bytes = 8 + struct.unpack("<Q", blob[:8])[0]
        for at in (header_bytes, (header_bytes + len(blob)) // 2, len(blob) - 1):
            damaged = bytearray(blob)
            damaged[at] ^= 0x10
            assert 422 == reserved.put(bytes(damaged))
    with reservation(decode) as reserved:
        puts = decode.metric("handoff_kv_puts_total", status="200")
        for end in range(0, len(reserved.blob), 997):
            assert reserved.put(reserved.blob[:end]) in (400, 409)
        assert puts == decode.metric("handoff_kv_puts_total", status="200")
    assert_alive(decode)


def test_tickets_open_their_own_reservation_once(decode: RunningWorker) -> None:
    """Forged, altered, another's, from before a restart, expired: 401 or 410. Used already, or cancelled: 410."""
    with reservation(decode) as other, reservation(decode) as reserved:
        own = Ticket.verify(reserved.handoff.ticket, SECRET.encode())
        before = pool_bytes(decode)
        for ticket, status in (
            ("", 401),
            ("x" * 200, 401),
            (own.sign(b"another secret"), 401),
            (reserved.handoff.ticket[:-4] + "AAAA", 401),
            (other.handoff.ticket, 401),
            (replace(own, boot="0" * 16).sign(SECRET.encode()), 410),
            (replace(own, expires_at=0.0).sign(SECRET.encode()), 410),
            (replace(own, epoch=own.epoch + 1).sign(SECRET.encode()), 410),
        ):
            assert status == reserved.put(reserved.blob, ticket=ticket), ticket
        assert before == pool_bytes(decode)
    wait_until(lambda: decode.worker.engine.num_groups == 0)
    before = pool_bytes(decode)
    assert 410 == reserved.put(reserved.blob)
    assert before == pool_bytes(decode)

    lines: list[str] = []
    with reservation(decode, lines) as reserved:
        assert 200 == reserved.put(reserved.blob)
        assert 410 == reserved.put(reserved.blob)
    assert "finish" in json.loads(lines[-1])
    assert_alive(decode)

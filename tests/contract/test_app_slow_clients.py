"""A client that takes nothing of its answer: what it holds up is given back."""

from __future__ import annotations

import json
import socket

from tests.contract.site import SiteMaker


async def test_a_stream_that_nobody_reads_gives_its_admission_back(site: SiteMaker) -> None:
    """Its client stays connected and reads nothing: with the only slot taken, everybody else was told 429."""
    async with site(max_inflight=1, send_timeout_s=0.4) as s:
        body = {"prompt": [[1] * 4000] * 4, "n": 128, "echo": True, "max_tokens": 1, "stream": True}
        content = json.dumps(body).encode()
        with socket.socket() as sock:
            sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
            sock.connect((s.http.base_url.host, s.http.base_url.port))
            sock.sendall(b"POST /v1/completions HTTP/1.1\r\nhost: x\r\n")
            sock.sendall(b"content-length: %d\r\n\r\n" % len(content) + content)
            while not await s.metric("handoff_in_flight"):
                pass
            assert 429 == (await s.complete()).status_code
            await s.quiet()
            assert 200 == (await s.complete()).status_code

"""curl and plain sockets: framing, old HTTP, other methods, a client that waits before it sends."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from tests.support.cluster import Cluster, wait_until
from tests.support.servers import connect, read_until, send_request

BODY = json.dumps({"model": "tiny", "prompt": "Once upon", "max_tokens": 8, "stream": True})
needs_curl = pytest.mark.skipif(shutil.which("curl") is None, reason="curl is not installed")


def curl(cluster: Cluster, *options: str) -> subprocess.CompletedProcess[str]:
    """curl on /v1/completions, its exit code told."""
    command = ["curl", "--silent", "--noproxy", "*", *options, f"{cluster.url}/v1/completions"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)


@needs_curl
@pytest.mark.parametrize("version", ["--http1.1", "--http1.0"])
def test_curl_gets_a_clean_stream(pd: Cluster, version: str) -> None:
    """Unbuffered, ended properly, under the old protocol by closing."""
    done = curl(pd, "--no-buffer", version, "--data", BODY)

    assert 0 == done.returncode, done.stderr
    assert done.stdout.endswith("data: [DONE]\n\n")
    assert all(line == "" or line.startswith(("data: ", ": ")) for line in done.stdout.split("\n"))


@needs_curl
def test_curl_that_gives_up_leaves_nothing_behind(pd: Cluster) -> None:
    """It is cut after a moment; both workers drop the work."""
    body = json.dumps(
        {"model": "tiny", "prompt": "x", "max_tokens": 4000, "stream": True, "ignore_eos": True}
    )
    done = curl(pd, "--max-time", "0.5", "--data", body)

    assert 28 == done.returncode
    wait_until(lambda: all(running.worker.pool.counts().live == 0 for running in pd.workers))


@needs_curl
def test_curl_that_expects_100_continue_is_answered(pd: Cluster) -> None:
    """As it does by itself for long bodies."""
    done = curl(pd, "--header", "Expect: 100-continue", "--data", BODY, "--include", "--http1.1")

    assert 0 == done.returncode
    assert done.stdout.startswith("HTTP/1.1 100 Continue")
    assert "data: [DONE]" in done.stdout


@pytest.mark.parametrize(("method", "status"), [("HEAD", 405), ("OPTIONS", 405), ("GET", 405), ("PUT", 405)])
def test_other_methods_are_told_so_and_the_connection_lives(pd: Cluster, method: str, status: int) -> None:
    """A HEAD has no body, and the next request on the same connection is answered."""
    with connect(pd.router) as sock:
        send_request(sock, method, "/v1/completions")
        head = read_until(sock, b"\r\n\r\n")
        assert head.startswith(f"HTTP/1.1 {status} ".encode())
        if method != "HEAD":
            length = int(head.lower().partition(b"content-length: ")[2].split(b"\r\n")[0])
            rest = head.partition(b"\r\n\r\n")[2]
            while len(rest) < length:
                rest += sock.recv(65536)
            assert b'"error"' in rest
        send_request(sock, "GET", "/health")
        assert read_until(sock, b"}").startswith(b"HTTP/1.1 200 OK")


def test_a_stream_is_chunked_and_never_compressed(pd: Cluster) -> None:
    """Whatever the client would accept."""
    with connect(pd.router) as sock:
        headers = {"Accept-Encoding": "gzip, br", "Content-Type": "text/plain", "Connection": "close"}
        send_request(sock, "POST", "/v1/completions", headers=headers, body=BODY.encode())
        answer = read_until(sock, b"\r\n0\r\n\r\n").lower()

    head = answer.partition(b"\r\n\r\n")[0]
    assert b"transfer-encoding: chunked" in head
    assert b"content-length" not in head
    assert b"content-encoding" not in head
    assert b"x-accel-buffering: no" in head
    assert b"text/event-stream" in head

"""curl and plain sockets: framing, old HTTP, other methods, a client that waits before it sends."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from tests.support.cluster import AUTH, Cluster, wait_until
from tests.support.servers import ServerThread, connect, read_until, send_request

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


@pytest.mark.parametrize(
    "path", ["/health", "/ready", "/metrics", "/v1/models", "/v1/models/tiny", "/nowhere"]
)
def test_a_head_is_a_get_without_body(pd: Cluster, path: str) -> None:
    """Status and headers of the router's GET routes are the same, and the connection lives on."""
    check_head(pd.router, path, {})


@pytest.mark.parametrize("path", ["/health", "/ready", "/metrics", "/v1/info"])
@pytest.mark.parametrize("role", [0, 1])
def test_a_head_is_a_get_without_body_on_workers(pd: Cluster, path: str, role: int) -> None:
    """Load balancers look at them in the same way."""
    check_head(pd.workers[role].server, path, AUTH)


def check_head(server: ServerThread, path: str, headers: dict[str, str]) -> None:
    """HEAD and then GET on one connection."""
    with connect(server) as sock:
        send_request(sock, "HEAD", path, headers=headers)
        head = read_until(sock, b"\r\n\r\n")
        assert head.endswith(b"\r\n\r\n")
        send_request(sock, "GET", path, headers={"Connection": "close", **headers})
        get_head, _, body = read_until(sock, b"nothing but the end").partition(b"\r\n\r\n")
    assert head.split(b"\r\n")[0] == get_head.split(b"\r\n")[0]
    assert _names(head) | {b"connection"} == _names(get_head) | {b"connection"}
    assert body


def _names(head: bytes) -> set[bytes]:
    return {line.partition(b":")[0].lower() for line in head.split(b"\r\n")[1:] if line}


@pytest.mark.parametrize("path", ["/v1/chat/completions", "/v1/completions", "/tokenize"])
@pytest.mark.parametrize("body", [b"nothex\r\n", b"2\r\n{}X\r\n", b"5\r\n{}\r\n0\r\n\r\nGET"])
def test_a_body_with_broken_framing_is_a_400(pd: Cluster, path: str, body: bytes) -> None:
    """The connection once just ended. The client is told, and nothing of the request is left."""
    with connect(pd.router) as sock:
        head = f"POST {path} HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\n"
        sock.sendall(head.encode() + body)
        answer_head, _, answer = read_until(sock, b"nothing but the end").partition(b"\r\n\r\n")
    assert answer_head.startswith(b"HTTP/1.1 400 ")
    assert "invalid_request_error" == json.loads(answer)["error"]["type"]
    wait_until(lambda: pd.router.num_requests == 0)


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

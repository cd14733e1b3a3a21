"""`handoff health`."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from typer.testing import CliRunner

from services.cli.host import free_ports
from services.cli.main import app


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        self.send_response(200 if self.path == "/ready" else 503)
        self.end_headers()
        self.wfile.write(b"no decode worker" if self.path != "/ready" else b"")

    def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name
        """Say nothing."""


@pytest.fixture
def url() -> Iterator[str]:
    """A server that is ready at /ready only."""
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    yield f"http://127.0.0.1:{server.server_port}"
    server.shutdown()
    thread.join()
    server.server_close()


def _health(url: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, ["health", url, "--timeout", "5"])
    return result.exit_code, result.output


def test_a_good_answer_is_status_0_and_silence(url: str) -> None:
    """What a container health check wants."""
    assert (0, "") == _health(f"{url}/ready")


def test_a_bad_answer_is_status_1_with_its_reason(url: str) -> None:
    """The status and the body say why, in the container's health log."""
    assert (1, f"{url}/other: HTTP 503 no decode worker\n") == _health(f"{url}/other")


@pytest.mark.parametrize("bad", ["http://127.0.0.1:{closed}/ready", "nonsense", "http://[::1"])
def test_no_answer_is_status_1(bad: str) -> None:
    """Nobody listens, or it is no address: one line, no stack trace."""
    status, output = _health(bad.replace("{closed}", str(free_ports(1)[0])))
    assert 1 == status
    assert 1 == len(output.splitlines())


def test_proxies_of_the_environment_are_not_asked(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A proxy knows nothing of our loopback address."""
    monkeypatch.setenv("http_proxy", f"http://127.0.0.1:{free_ports(1)[0]}")
    assert (0, "") == _health(f"{url}/ready")

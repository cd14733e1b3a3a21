"""A Hugging Face hub on a free local port that serves one checkpoint folder as one repository."""

from __future__ import annotations

import hashlib
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

COMMIT = "0123456789abcdef0123456789abcdef01234567"


class FakeHub:
    """url: what HF_ENDPOINT would be. requests: every path that was asked for. refuses_files: answer 403."""

    def __init__(self, repo_id: str, folder: Path) -> None:
        self.repo_id = repo_id
        self.folder = folder
        self.requests: list[str] = []
        self.refuses_files = False
        self.url = ""

    def answer(self, path: str) -> tuple[int, bytes, dict[str, str]]:
        """Status, body and headers for one request."""
        self.requests.append(path)
        names = sorted(file.name for file in self.folder.iterdir())
        route = path.partition("?")[0]
        if route == "/":
            return 200, b"hub", {}
        if route == f"/api/models/{self.repo_id}/revision/main":
            siblings = [{"rfilename": name} for name in names]
            return 200, json.dumps({"id": self.repo_id, "sha": COMMIT, "siblings": siblings}).encode(), {}
        if route == f"/api/models/{self.repo_id}/tree/{COMMIT}":
            return 200, json.dumps([self._row(name) for name in names]).encode(), {}
        if route.startswith(f"/{self.repo_id}/resolve/{COMMIT}/"):
            if self.refuses_files:
                return 403, b"", {}
            content = (self.folder / route.rpartition("/")[2]).read_bytes()
            return 200, content, {"ETag": f'"{_digest(content)}"', "X-Repo-Commit": COMMIT}
        return 404, b"{}", {"X-Error-Code": "RepoNotFound"}

    def _row(self, name: str) -> dict[str, object]:
        content = (self.folder / name).read_bytes()
        return {"type": "file", "path": name, "size": len(content), "oid": _digest(content)}


@contextmanager
def fake_hub(repo_id: str, folder: Path) -> Iterator[FakeHub]:
    """Serve `folder` as `repo_id` until the block ends."""
    hub = FakeHub(repo_id, folder)

    class Handler(BaseHTTPRequestHandler):
        def do_HEAD(self) -> None:
            self._reply(send_body=False)

        def do_GET(self) -> None:
            self._reply(send_body=True)

        def _reply(self, *, send_body: bool) -> None:
            status, body, headers = hub.answer(self.path)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            if send_body:
                self.wfile.write(body)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - the base class's name
            pass

    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        hub.url = f"http://127.0.0.1:{server.server_address[1]}"
        thread = threading.Thread(target=server.serve_forever, name="fake-hub")
        thread.start()
        try:
            yield hub
        finally:
            server.shutdown()
            thread.join()


def _digest(content: bytes) -> str:
    return hashlib.sha1(content, usedforsecurity=False).hexdigest()

"""A worker's own routes from the command line: the shared secret, one client, and errors in one line."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import typer
from pydantic import ValidationError

from shared.asgi.answers import from_error_response
from shared.errors import ServingError
from shared.secret import load_secret
from shared.settings import BadSettings
from shared.wire import PROTOCOL_VERSION, WorkerInfo

_CONNECT_S = 5.0
_MAX_ERROR_BYTES = 64 * 1024


class WorkerProblem(Exception):
    """A worker cannot be asked, or refuses. The text is one clear line that names its URL."""


def secret_of(secret_file: Path | None) -> str:
    """The secret from HANDOFF_SECRET or the file. Raises typer.BadParameter: a usage error, exit status 2."""
    try:
        return load_secret(os.environ.get("HANDOFF_SECRET"), secret_file)
    except BadSettings as exc:
        raise typer.BadParameter(str(exc)) from exc


@contextmanager
def worker_client(url: str, secret: str, timeout_s: float) -> Iterator[httpx.Client]:
    """A client of one worker. timeout_s: longest silence. Within, httpx's errors become WorkerProblem."""
    try:
        # A proxy from the environment must never stand between us and a worker.
        with httpx.Client(
            base_url=url,
            headers={"Authorization": f"Bearer {secret}"},
            timeout=httpx.Timeout(timeout_s, connect=_CONNECT_S),
            trust_env=False,
        ) as client:
            yield client
    except (httpx.HTTPError, httpx.InvalidURL) as exc:
        raise WorkerProblem(f"{url}: {str(exc) or type(exc).__name__}") from exc


def check_answer(url: str, response: httpx.Response) -> None:
    """Raise WorkerProblem with the worker's own words unless it answered 200. Works on a stream, too."""
    if response.status_code == httpx.codes.OK:
        return
    body = b""
    for piece in response.iter_bytes():
        body += piece
        if len(body) > _MAX_ERROR_BYTES:
            break
    raise refused(url, from_error_response(response.status_code, body))


def refused(url: str, error: ServingError) -> WorkerProblem:
    """What a worker or a library of ours said, as one line."""
    return WorkerProblem(f"{url}: {error.message}")


def worker_info(client: httpx.Client, url: str) -> WorkerInfo:
    """GET /v1/info. Raises WorkerProblem; httpx's errors are converted by `worker_client`."""
    response = client.get("/v1/info")
    check_answer(url, response)
    try:
        info = WorkerInfo.model_validate_json(response.content)
    except ValidationError as exc:
        raise WorkerProblem(f"{url}: this is no worker of this version of handoff") from exc
    if info.protocol != PROTOCOL_VERSION:
        raise WorkerProblem(f"{url}: speaks protocol {info.protocol}, this command {PROTOCOL_VERSION}")
    return info

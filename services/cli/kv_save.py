"""`handoff kv save`: fetch a hand-off that a prefill worker has kept, whole and verified or not at all."""

from __future__ import annotations

import os
import tempfile
from pathlib import Path

from services.cli.kv_blob import BlobCheck, NoBlob, check_blob
from services.cli.workers import WorkerProblem, check_answer, worker_client


def save_handoff(url: str, secret: str, request_id: str, output: Path, timeout_s: float) -> BlobCheck:
    """Write the file, readable by its owner only. Raises WorkerProblem, NoBlob or OSError; nothing is left then."""
    descriptor, draft = tempfile.mkstemp(prefix=f".{output.name}.", dir=output.parent)  # mode 0600
    path = Path(draft)
    try:
        with (
            os.fdopen(descriptor, "wb") as file,
            worker_client(url, secret, timeout_s) as client,
            client.stream("GET", f"/v1/kv/{request_id}") as response,
        ):
            check_answer(url, response)
            for piece in response.iter_bytes():
                file.write(piece)
        check = check_blob(path)
        if not check.sound:
            raise NoBlob(check.problems[0])
        if check.saved is None or check.saved.work.request_id != request_id:
            raise WorkerProblem(f"{url}: sent the hand-off of another request")
        path.replace(output)
    finally:
        path.unlink(missing_ok=True)
    return check

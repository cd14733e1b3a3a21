"""`handoff kv replay`: feed a saved hand-off to a decode worker as a prefill worker would, and tell what it says.

Nothing is bypassed: a real reservation, its ticket, one PUT over TCP with manifest and digests, and the decode
worker's own checks. In place of the pool the sender reads the file, mapped into memory.
"""

from __future__ import annotations

import mmap
import secrets
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import httpx
from pydantic import ValidationError

from services.cli.kv_blob import BlobCheck
from services.cli.workers import WorkerProblem, check_answer, refused, worker_client, worker_info
from shared.asgi.answers import from_error_body
from shared.errors import ServingError
from shared.kv.layout import BlobLayout
from shared.kv.manifest import Expected, Manifest, plan_chunks
from shared.kv.outgoing import Send, SendTimeouts
from shared.kv.progress import FirstTokens, Progress
from shared.kv.saved import SavedRequest
from shared.kv.sender import KvSender
from shared.kv.shape import Kind, tensor_index
from shared.kv.transports.tcp import TcpTransport
from shared.wire import MAX_TIMEOUT_S, DecodeEvent, DecodeRequest, Finish, Handoff, Sent, TokenOut


class CannotReplay(Exception):
    """The file, sound or not, is nothing that could be replayed. The text is one clear line."""


class MappedKv:
    """KV of a file as what a sender reads from (shared.kv.source.KvSource). The file's KV begins at token 0."""

    def __init__(self, content: memoryview, layout: BlobLayout, header_bytes: int) -> None:
        self._data = content[header_bytes:]
        self._layout = layout

    def views(self, layer: int, kind: Kind, start: int, end: int) -> Sequence[memoryview]:
        """The bytes of [start, end), one view for each chunk of the file that they lie in."""
        at = tensor_index(layer, kind)
        views = []
        for parts in self._layout.chunks:
            part = parts[at]
            first, last = max(start, part.start), min(end, part.end)
            if first < last:
                row_bytes = self._layout.row_bytes
                begin = part.begin + (first - part.start) * row_bytes
                views.append(self._data[begin : begin + (last - first) * row_bytes])
        return views


@dataclass(frozen=True)
class Replay:
    """A sound file, ready to be fed to any number of workers."""

    path: Path
    header_bytes: int
    layout: BlobLayout
    saved: SavedRequest
    first: FirstTokens

    @classmethod
    def of(cls, path: Path, check: BlobCheck) -> Replay:
        """Raises CannotReplay."""
        if not check.sound or check.first is None:
            raise CannotReplay(check.problems[0])
        if check.saved is None or check.layout.manifest.from_token:
            raise CannotReplay(
                "the file does not hold the whole prompt and its token ids; `handoff kv save` writes one that does"
            )
        if all(check.first.finished):
            raise CannotReplay("every choice ended with its first token: there is nothing to decode")
        return cls(path, check.header_bytes, check.layout, check.saved, check.first)

    def run(
        self, url: str, secret: str, *, max_tokens: int | None, timeout_s: float
    ) -> Iterator[Sent | list[TokenOut] | Finish]:
        """Sent, then tokens per step, then Finish. Raises WorkerProblem; leaving early cancels at the worker.

        timeout_s: longest silence of the worker; how long it takes in all is not limited.
        """
        with worker_client(url, secret, timeout_s) as client:
            self._check_worker(client, url)
            body = self._request(max_tokens).to_json()
            with client.stream("POST", "/v1/decode", content=body) as response:
                check_answer(url, response)
                lines = response.iter_lines()
                reserved = _read(url, next(lines, "")).reserved
                if reserved is None:
                    raise WorkerProblem(f"{url}: answered without a reservation")
                yield self._send(url, secret, reserved, timeout_s)
                for line in lines:
                    event = _read(url, line)
                    if event.tokens is not None:
                        yield event.tokens
                    if event.finish is not None:
                        yield event.finish
                        return
                raise WorkerProblem(f"{url}: the answer was cut")

    def _check_worker(self, client: httpx.Client, url: str) -> None:
        """Say which fields differ; the worker itself would only say that the fingerprint does."""
        info = worker_info(client, url)
        if info.role != "decode":
            raise WorkerProblem(f"{url}: is a {info.role} worker, a replay needs a decode worker")
        if differing := info.fingerprint.differences(self.saved.fingerprint):
            raise WorkerProblem(
                f"{url}: serves {info.model}, and this KV is of {self.saved.model}: {', '.join(differing)} differ"
            )

    def _request(self, max_tokens: int | None) -> DecodeRequest:
        work = self.saved.work
        sampling = work.sampling
        if max_tokens is not None:
            generated = len(work.token_ids) - work.num_prompt_tokens
            sampling = sampling.model_copy(update={"max_tokens": generated + max_tokens})
        fields = {name: getattr(work, name) for name in type(work).model_fields}
        return DecodeRequest(
            **fields
            | {
                "sampling": sampling,
                "request_id": f"replay-{secrets.token_hex(8)}",
                "timeout_s": MAX_TIMEOUT_S,
            }
        )

    def _send(self, url: str, secret: str, handoff: Handoff, timeout_s: float) -> Sent:
        manifest = self.layout.manifest
        fields = {name: getattr(manifest, name) for name in Expected.__dataclass_fields__}
        size = max((end - start for start, end in manifest.chunks), default=0)
        have = min(handoff.have_tokens, manifest.num_tokens)
        fields |= {"handoff_id": handoff.handoff_id, "epoch": handoff.epoch, "from_token": have}
        progress = Progress()
        progress.finish(self.first.token_ids, self.first.finished)
        sender = KvSender(secret.encode(), [TcpTransport()], SendTimeouts(io_s=timeout_s))
        try:
            return sender.send(
                Send(
                    handoff=handoff,
                    request_id=self.saved.work.request_id,
                    manifest=Manifest(
                        **fields, chunks=plan_chunks(have, manifest.num_tokens, size, manifest.shape)
                    ),
                    source=MappedKv(_mapped(self.path), self.layout, self.header_bytes),
                    progress=progress,
                )
            )
        except ServingError as exc:
            raise refused(url, exc) from exc
        finally:
            sender.close()


def _mapped(path: Path) -> memoryview:
    """The file's bytes; unmapped when the last view of them has gone."""
    with path.open("rb") as file:
        return memoryview(mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ))


def _read(url: str, line: str) -> DecodeEvent:
    try:
        event = DecodeEvent.model_validate_json(line)
    except ValidationError as exc:
        raise WorkerProblem(f"{url}: the answer was cut, or is none of this version") from exc
    if event.error is not None:
        raise refused(url, from_error_body(event.error))
    return event

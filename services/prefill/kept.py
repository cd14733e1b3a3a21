"""Hand-offs kept for people who debug: off unless a folder is set, bounded, and the oldest go first.

A file holds KV and token ids, so it is readable by its owner only. What a killed process left half-written counts
against the bounds like the rest, and goes when it is the oldest.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
import threading
from collections.abc import AsyncIterator
from pathlib import Path
from typing import BinaryIO

import structlog

from shared.asgi.stream import StreamHead
from shared.errors import NotKept
from shared.kv.limits import ReceiveLimits
from shared.kv.progress import FirstTokens
from shared.kv.saved import SavedLayout, write_saved
from shared.kv.source import KvSource

log = structlog.get_logger()

# Nothing else in the folder is ever deleted.
SUFFIX = ".kv.safetensors"
_PIECE_BYTES = 1024 * 1024


class KeptHandoffs:
    """The newest hand-off of each request in a folder. Thread-safe; several workers may share a folder.

    folder: made on the first write if it is missing; None keeps nothing.
    """

    def __init__(self, folder: Path | None, *, max_files: int, max_bytes: int) -> None:
        self._folder = folder
        self._max_files = max_files
        self._max_bytes = max_bytes
        self._lock = threading.Lock()

    @property
    def enabled(self) -> bool:
        """Whether anything is kept."""
        return self._folder is not None

    def keep(self, layout: SavedLayout, source: KvSource, first: FirstTokens) -> None:
        """Write the file of `layout.request`, then delete the oldest ones. Blocks; failures are logged, not raised.

        What exceeds the bounds alone, or could not be read back, is not written.
        """
        request_id = layout.request.work.request_id
        if self._folder is None:
            return
        if layout.total_bytes > self._max_bytes or len(layout.header) > ReceiveLimits().max_header_bytes:
            log.warning("kv_not_kept", request_id=request_id, reason="too large", bytes=layout.total_bytes)
            return
        try:
            self._write(self._folder, f"{request_id}{SUFFIX}", layout, source, first)
            with self._lock:
                self._evict(self._folder)
        except OSError as exc:
            log.warning("kv_not_kept", request_id=request_id, reason=exc.strerror or "input/output error")

    def open(self, request_id: str) -> BinaryIO:
        """The file of a request: stays readable when it is deleted meanwhile. Raises NotKept."""
        if self._folder is None:
            raise NotKept("this worker keeps no hand-offs: HANDOFF_KV_SAVE_DIR is not set")
        try:
            return (self._folder / f"{request_id}{SUFFIX}").open("rb")
        except OSError as exc:
            raise NotKept(f"no hand-off of {request_id} is kept here (any more)") from exc

    @staticmethod
    def _write(folder: Path, name: str, layout: SavedLayout, source: KvSource, first: FirstTokens) -> None:
        """The file appears whole or not at all."""
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor, draft = tempfile.mkstemp(prefix=".", suffix=SUFFIX, dir=folder)  # mode 0600
        try:
            with os.fdopen(descriptor, "wb") as file:
                write_saved(file, layout, source, first)
            Path(draft).replace(folder / name)
        except BaseException:
            Path(draft).unlink(missing_ok=True)
            raise

    def _evict(self, folder: Path) -> None:
        """Delete the oldest files until the rest keeps to the bounds."""
        files = []
        for path in folder.iterdir():
            if path.name.endswith(SUFFIX):
                try:
                    status = path.stat()
                except FileNotFoundError:
                    continue  # another worker was first
                files.append((status.st_mtime_ns, status.st_size, path))
        left_bytes = sum(size for _, size, _ in files)
        left_files = len(files)
        for _, size, path in sorted(files):
            if left_files <= self._max_files and left_bytes <= self._max_bytes:
                return
            path.unlink(missing_ok=True)
            left_files -= 1
            left_bytes -= size


class KeptFile:
    """Owner of the stream that carries one kept file (shared.asgi.stream.StreamOwner)."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file

    async def start(self) -> StreamHead:
        """Its length, so that a cut copy is seen."""
        return StreamHead(headers={"content-length": str(os.fstat(self._file.fileno()).st_size)})

    async def chunks(self) -> AsyncIterator[bytes]:
        """The bytes, front to back."""
        while piece := await asyncio.to_thread(self._file.read, _PIECE_BYTES):
            yield piece

    async def aclose(self) -> None:
        """Close the file."""
        self._file.close()

"""The cache folder: one lock per entry, entries appear whole or not at all, and nothing half-written stays.

    <cache>/downloads/    files fetched from elsewhere
    <cache>/checkpoints/  checkpoint folders made here
    <cache>/locks/        one lock file per entry

A killed process cannot clean up. Its unfinished entry has a fixed name (`<entry>.partial`) that only the
holder of the entry's lock may touch, so the next process that makes the entry removes it first.
"""

from __future__ import annotations

import errno
import os
import shutil
import signal
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from pathlib import Path
from types import FrameType

from filelock import FileLock, Timeout

from shared.models.error import ModelError

Report = Callable[[str], None]

_LOCK_NOTICE_S = 1.0
_SPACE_MARGIN_BYTES = 64 << 20


def default_cache_dir(environ: Mapping[str, str]) -> Path:
    """HANDOFF_CACHE_DIR, else `handoff` in the user's cache folder."""
    if chosen := environ.get("HANDOFF_CACHE_DIR"):
        return Path(chosen).expanduser()
    base = environ.get("XDG_CACHE_HOME")
    return (Path(base) if base else Path.home() / ".cache") / "handoff"


def make_entry(cache_dir: Path, entry: str, make: Callable[[Path], None], *, report: Report) -> Path:
    """The path of `entry` (relative to the cache), made by `make` if it is not there yet.

    `make` gets a path that does not exist and creates a file or a folder there; it is renamed into place when
    `make` returns, and removed when it raises, also on SIGTERM and Ctrl-C. Of several processes that want the
    entry at once, one makes it and the others wait.
    Raises ModelError: no space, a cache that cannot be written, or whatever `make` says.
    """
    target = cache_dir / entry
    if target.exists():
        return target
    partial = target.with_name(target.name + ".partial")
    with locked(cache_dir, entry, report), _terminable():
        if target.exists():
            return target
        target.parent.mkdir(parents=True, exist_ok=True)
        remove(partial)
        try:
            make(partial)
            _flush(partial)
            partial.rename(target)
        finally:
            remove(partial)
    return target


def remove(path: Path) -> None:
    """Delete a file or a folder; an absent one is fine."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)


def require_space(folder: Path, needs_bytes: int) -> None:
    """Raise ModelError unless `needs_bytes` and a margin are free where `folder` lies."""
    free = shutil.disk_usage(folder).free
    if free < needs_bytes + _SPACE_MARGIN_BYTES:
        raise ModelError(
            f"no space in {folder}: {needs_bytes / 1e9:.1f} GB are needed and {free / 1e9:.1f} GB are free"
        )


def write_whole(path: Path, content: bytes) -> None:
    """Write a small file that other processes see whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_name(f".{path.name}.{os.getpid()}.{threading.get_ident()}")
    try:
        partial.write_bytes(content)
        partial.replace(path)
    finally:
        partial.unlink(missing_ok=True)


@contextmanager
def locked(cache_dir: Path, entry: str, report: Report) -> Iterator[None]:
    """Hold the lock of one cache entry among all processes; system errors inside become ModelError."""
    path = cache_dir / "locks" / (entry.replace("/", "-") + ".lock")
    lock = FileLock(path)
    with _converted_errors(cache_dir):
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            lock.acquire(timeout=_LOCK_NOTICE_S)
        except Timeout:
            report(f"waiting for another process that makes {Path(entry).name}")
            lock.acquire()
        try:
            yield
        finally:
            lock.release()


@contextmanager
def _terminable() -> Iterator[None]:
    """Let SIGTERM unwind the stack like Ctrl-C does, so that `finally` runs. In the main thread only."""
    if threading.current_thread() is not threading.main_thread():
        yield
        return

    def stop(number: int, _frame: FrameType | None) -> None:
        raise SystemExit(128 + number)

    previous = signal.signal(signal.SIGTERM, stop)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, previous)


@contextmanager
def _converted_errors(cache_dir: Path) -> Iterator[None]:
    try:
        yield
    except OSError as exc:
        if exc.errno in (errno.ENOSPC, errno.EDQUOT):
            raise ModelError(f"no space left in {cache_dir}") from exc
        raise ModelError(f"cannot use the cache {cache_dir}: {exc.strerror or exc}") from exc


def _flush(path: Path) -> None:
    """Put all of it on the disk before it gets its final name, so that no power cut leaves holes in an entry."""
    for item in [path, *path.rglob("*")] if path.is_dir() else [path]:
        handle = os.open(item, os.O_RDONLY)
        try:
            with (
                suppress(OSError) if item.is_dir() else nullcontext()
            ):  # some file systems do not sync folders
                os.fsync(handle)
        finally:
            os.close(handle)

"""Cache entries: whole or absent, made once, nothing left behind."""

from __future__ import annotations

import errno
import signal
import subprocess
import sys
from pathlib import Path

import pytest

from shared.models.error import ModelError
from shared.models.store import default_cache_dir, make_entry, require_space, write_whole

_MAKER = """
import sys, time
from pathlib import Path
from shared.models.store import make_entry

cache, log = Path(sys.argv[1]), Path(sys.argv[2])

def make(partial):
    partial.mkdir()
    (partial / "data").write_text("half")
    with log.open("a") as out:
        out.write("made\\n")
    print("making", flush=True)
    if sys.argv[3] == "hang":
        sys.stdin.read()
    (partial / "data").write_text("whole")

make_entry(cache, "checkpoints/x", make, report=lambda line: None)
"""


def _start(tmp_path: Path, mode: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-c", _MAKER, str(tmp_path / "cache"), str(tmp_path / "log"), mode]
    return subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)


def _left(cache: Path) -> list[str]:
    return sorted(str(p.relative_to(cache)) for p in cache.rglob("*") if p.parent.name != "locks")


def test_an_entry_is_made_once_and_then_found(tmp_path: Path) -> None:
    """The second call returns the entry without making it."""
    made = []

    def make(partial: Path) -> None:
        made.append(partial)
        partial.write_text("content")

    paths = {make_entry(tmp_path, "downloads/file", make, report=print) for _ in range(2)}
    assert {tmp_path / "downloads" / "file"} == paths
    assert 1 == len(made)


@pytest.mark.parametrize("failure", [ModelError("no"), KeyboardInterrupt(), OSError(errno.EIO, "broken")])
def test_nothing_stays_of_a_failed_entry(tmp_path: Path, failure: BaseException) -> None:
    """Whatever ends the making, no file of it is left and the next try may succeed."""

    def fail(partial: Path) -> None:
        partial.mkdir()
        (partial / "half").write_text("half")
        raise failure

    with pytest.raises((ModelError, KeyboardInterrupt)):
        make_entry(tmp_path, "checkpoints/x", fail, report=print)
    assert ["checkpoints", "locks"] == _left(tmp_path)
    assert make_entry(tmp_path, "checkpoints/x", Path.mkdir, report=print).is_dir()


def test_sigterm_leaves_nothing_half_written(tmp_path: Path) -> None:
    """A process that is asked to end while it makes an entry removes what it has written."""
    with _start(tmp_path, "hang") as process:
        assert process.stdout is not None
        assert "making\n" == process.stdout.readline()
        process.send_signal(signal.SIGTERM)
        assert 128 + signal.SIGTERM == process.wait(10)
    assert ["checkpoints", "locks"] == _left(tmp_path / "cache")


def test_what_a_killed_process_left_is_removed_by_the_next(tmp_path: Path) -> None:
    """SIGKILL leaves a partial entry; the next maker starts afresh and leaves a whole one only."""
    with _start(tmp_path, "hang") as process:
        assert process.stdout is not None
        process.stdout.readline()
        process.kill()
    assert "checkpoints/x.partial" in _left(tmp_path / "cache")
    with _start(tmp_path, "finish") as process:
        assert 0 == process.wait(10)
    assert ["checkpoints", "checkpoints/x", "checkpoints/x/data", "locks"] == _left(tmp_path / "cache")
    assert "whole" == (tmp_path / "cache/checkpoints/x/data").read_text()


def test_of_three_processes_one_makes_the_entry(tmp_path: Path) -> None:
    """Processes that start together all succeed and the work is done once."""
    processes = [_start(tmp_path, "finish") for _ in range(3)]
    for process in processes:
        with process:
            process.communicate(timeout=30)
    assert [0, 0, 0] == [process.returncode for process in processes]
    assert "made\n" == (tmp_path / "log").read_text()


def test_a_full_disk_is_one_clear_line(tmp_path: Path) -> None:
    """Too little space is told before the work where it is known, and as such where it is not."""
    with pytest.raises(ModelError, match=r"no space in .* are needed and .* are free"):
        require_space(tmp_path, 1 << 60)

    def fill(partial: Path) -> None:
        raise OSError(errno.ENOSPC, "No space left on device")

    with pytest.raises(ModelError, match="no space left in"):
        make_entry(tmp_path, "checkpoints/x", fill, report=print)


def test_a_cache_that_cannot_be_a_folder_is_one_clear_line(tmp_path: Path) -> None:
    """A cache path that is a file is a ModelError, not a traceback."""
    (tmp_path / "file").write_text("")
    with pytest.raises(ModelError, match="cannot use the cache"):
        make_entry(tmp_path / "file", "downloads/x", Path.mkdir, report=print)


def test_small_files_are_replaced_whole(tmp_path: Path) -> None:
    """The new content replaces the old and no scratch file stays."""
    write_whole(tmp_path / "a" / "file", b"one")
    write_whole(tmp_path / "a" / "file", b"two")
    assert [b"two"] == [path.read_bytes() for path in (tmp_path / "a").iterdir()]


def test_the_cache_dir_follows_the_environment() -> None:
    """HANDOFF_CACHE_DIR wins over XDG_CACHE_HOME, which wins over the home folder."""
    assert Path("/c") == default_cache_dir({"HANDOFF_CACHE_DIR": "/c", "XDG_CACHE_HOME": "/x"})
    assert Path("/x/handoff") == default_cache_dir({"XDG_CACHE_HOME": "/x"})
    assert Path.home() / ".cache/handoff" == default_cache_dir({})

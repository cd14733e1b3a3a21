"""The shared secret: given or created once, never weak, never shown."""

from __future__ import annotations

import os
import stat
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from threading import Barrier

import pytest

from shared.secret import load_secret
from shared.settings import BadSettings

GOOD = "0123456789abcdef"


def test_a_given_secret_wins_over_the_file(tmp_path: Path) -> None:
    """The file is not even created."""
    path = tmp_path / "secret"
    assert GOOD == load_secret(GOOD, path)
    assert not path.exists()


def test_a_missing_file_is_created_for_its_owner_only(tmp_path: Path) -> None:
    """Folders are made, the mode is 0600, nothing else is left, and the next process reads the same."""
    path = tmp_path / "deep" / "secret"
    first = load_secret(None, path)
    assert len(first) >= 32
    assert 0o600 == stat.S_IMODE(path.stat().st_mode)
    assert ["secret"] == os.listdir(path.parent)
    assert first == load_secret(None, path)


def test_processes_that_start_together_agree(tmp_path: Path) -> None:
    """Whoever is first wins, and nobody reads a half-written file."""
    path = tmp_path / "secret"
    barrier = Barrier(8)

    def start() -> str:
        barrier.wait()
        return load_secret(None, path)

    with ThreadPoolExecutor(8) as pool:
        secrets = {future.result() for future in [pool.submit(start) for _ in range(8)]}
    assert 1 == len(secrets)
    assert ["secret"] == os.listdir(tmp_path)


def test_a_line_end_in_the_file_does_not_count(tmp_path: Path) -> None:
    """Editors and `echo` add one."""
    path = tmp_path / "secret"
    path.write_text(GOOD + "\n")
    assert GOOD == load_secret(None, path)


@pytest.mark.parametrize(
    "secret", ["", "short", "with a space in the middle", "not-äscii-not-äscii", "x" * 15]
)
def test_a_weak_or_unsendable_secret_is_refused_and_not_shown(secret: str, tmp_path: Path) -> None:
    """It must be long enough to be one, and fit into a header; the message does not hold it."""
    path = tmp_path / "secret"
    path.write_text(secret)
    for given, file in ((secret, None), (None, path)):
        with pytest.raises(BadSettings) as caught:
            load_secret(given, file)
        assert not secret or secret not in str(caught.value)


def test_without_either_the_start_stops() -> None:
    """There is no default secret."""
    with pytest.raises(BadSettings, match="HANDOFF_SECRET or HANDOFF_SECRET_FILE"):
        load_secret(None, None)


def test_a_file_that_cannot_be_read_is_one_clear_line(tmp_path: Path) -> None:
    """A folder, a binary file and a path below a file all end in BadSettings."""
    binary = tmp_path / "binary"
    binary.write_bytes(b"\xff" * 32)
    for path in (tmp_path, binary, binary / "below"):
        with pytest.raises(BadSettings, match="HANDOFF_SECRET_FILE"):
            load_secret(None, path)

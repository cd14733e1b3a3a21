"""Client keys: from the environment and from a file, never by mistake none."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from router.keys import load_keys
from router.settings import RouterSettings
from shared.settings import BadSettings, load


def settings(**environ: str) -> RouterSettings:
    """As `handoff router` reads them."""
    return load(RouterSettings, {f"HANDOFF_{name}": value for name, value in environ.items()})


def test_no_key_means_open() -> None:
    """Nothing is guarded unless it is asked for."""
    assert () == load_keys(settings())


def test_keys_of_environment_and_file_all_count(tmp_path: Path) -> None:
    """One a line; comments, empty lines and repetitions are left out."""
    path = tmp_path / "keys"
    path.write_text("# team a\nkey-a-0123456789\n\n  key-b-0123456789  \r\nkey-0-0123456789\n")

    keys = load_keys(settings(API_KEY="key-0-0123456789", API_KEY_FILE=str(path)))

    assert ("key-0-0123456789", "key-a-0123456789", "key-b-0123456789") == keys


@pytest.mark.parametrize(
    "content", ["", "# nothing\n\n", "short\n", "with space in it\n", "schlüssel-0123456789\n"]
)
def test_a_file_without_proper_keys_stops_the_start(tmp_path: Path, content: str) -> None:
    """An emptied file must not open the API; the text names the file and shows no key."""
    path = tmp_path / "keys"
    path.write_text(content)

    with pytest.raises(BadSettings, match="HANDOFF_API_KEY_FILE") as caught:
        load_keys(settings(API_KEY_FILE=str(path)))

    assert not any(line and line in str(caught.value) for line in content.splitlines())


def test_a_file_that_is_not_there_stops_the_start(tmp_path: Path) -> None:
    """With the reason."""
    with pytest.raises(BadSettings, match="No such file"):
        load_keys(settings(API_KEY_FILE=str(tmp_path / "none")))


@pytest.mark.parametrize(
    ("host", "key", "expected"),
    [
        ("0.0.0.0", "", True),
        ("::", "", True),
        ("192.0.2.1", "", True),
        ("a-name", "", True),
        ("0.0.0.0", "key-a-0123456789", False),
        ("127.0.0.1", "", False),
        ("::1", "", False),
        ("localhost", "", False),
    ],
)
def test_an_open_api_is_told_at_the_start(tmp_path: Path, host: str, key: str, expected: bool) -> None:
    """An empty key, as compose files give it, means none: who serves others without one reads it in the log."""
    environ = {"HANDOFF_HOST": host, "HANDOFF_API_KEY": key, "HANDOFF_DECODE_URLS": "http://127.0.0.1:9"}
    environ |= {"HANDOFF_SECRET": "s" * 32, "HANDOFF_MODEL": str(tmp_path / "none")}  # it ends after the look
    environ["HANDOFF_CACHE_DIR"] = str(tmp_path)

    process = subprocess.run(
        [sys.executable, "-m", "router"], env=environ, capture_output=True, text=True, timeout=60
    )

    output = process.stdout + process.stderr
    assert '"no_model"' in output
    assert expected == ('"open_to_anybody"' in output)

"""Client keys: from the environment and from a file, never by mistake none."""

from __future__ import annotations

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

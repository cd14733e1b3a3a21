"""Kept hand-offs: bounded in number and bytes, the oldest go, and nothing else in the folder does."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from services.prefill.kept import SUFFIX, KeptHandoffs
from shared.errors import NotKept
from shared.kv.saved import SavedLayout
from tests.unit.shared.kv.blobs import Pool, first_tokens
from tests.unit.shared.kv.test_saved import SHAPE, TOKENS, saved

LAYOUT = saved(TOKENS)[0]


def keep(kept: KeptHandoffs, request_id: str) -> None:
    """Keep ten tokens' KV under this id."""
    work = LAYOUT.request.work.model_copy(update={"request_id": request_id})
    layout = SavedLayout(LAYOUT.manifest, LAYOUT.request.model_copy(update={"work": work}))
    kept.keep(layout, Pool(SHAPE, num_tokens=10, seed=1).views(), first_tokens(1))


def names(folder: Path) -> set[str]:
    """Ids of what is kept."""
    return {path.name.removesuffix(SUFFIX) for path in folder.iterdir()}


def age(folder: Path, request_id: str) -> None:
    """Make a file an hour old."""
    os.utime(folder / f"{request_id}{SUFFIX}", (1_000_000, 1_000_000))


def test_the_oldest_go_when_there_are_too_many(tmp_path: Path) -> None:
    """Two are kept; what is not ours is never touched."""
    foreign = tmp_path / "model.safetensors"
    foreign.write_bytes(b"weights")
    kept = KeptHandoffs(tmp_path, max_files=2, max_bytes=1 << 20)
    for name in ("a", "b"):
        keep(kept, name)
    age(tmp_path, "b")

    keep(kept, "c")

    assert {"a", "c", "model.safetensors"} == names(tmp_path)


def test_the_oldest_go_when_they_are_too_large(tmp_path: Path) -> None:
    """Bytes are bounded like numbers; an unfinished file of a killed worker counts and goes, too."""
    (tmp_path / f".draft{SUFFIX}").write_bytes(bytes(LAYOUT.total_bytes))
    age(tmp_path, ".draft")
    kept = KeptHandoffs(tmp_path, max_files=100, max_bytes=LAYOUT.total_bytes * 5 // 2)
    keep(kept, "a")
    keep(kept, "b")

    assert {"a", "b"} == names(tmp_path)


def test_what_is_larger_than_the_bound_is_not_written(tmp_path: Path) -> None:
    """Nothing else is deleted for it either."""
    kept = KeptHandoffs(tmp_path / "kv", max_files=2, max_bytes=LAYOUT.total_bytes - 1)

    keep(kept, "a")

    assert not (tmp_path / "kv").exists()
    with pytest.raises(NotKept):
        kept.open("a")


def test_files_and_folder_are_for_the_owner_only(tmp_path: Path) -> None:
    """They hold prompts. A deleted file can still be read by who has opened it."""
    kept = KeptHandoffs(tmp_path / "kv", max_files=1, max_bytes=1 << 20)
    keep(kept, "a")
    path = tmp_path / "kv" / f"a{SUFFIX}"
    modes = [stat.S_IMODE(it.stat().st_mode) for it in (tmp_path / "kv", path)]

    with kept.open("a") as file:
        path.unlink()
        assert LAYOUT.total_bytes == len(file.read())
    assert [0o700, 0o600] == modes


def test_a_folder_that_cannot_be_written_harms_no_request(tmp_path: Path) -> None:
    """The failure is logged, not raised."""
    (tmp_path / "kv").write_text("no folder")

    keep(KeptHandoffs(tmp_path / "kv", max_files=1, max_bytes=1 << 20), "a")

    assert "no folder" == (tmp_path / "kv").read_text()


def test_nothing_is_kept_without_a_folder() -> None:
    """Off is the default, and the error says how to switch it on."""
    kept = KeptHandoffs(None, max_files=1, max_bytes=1 << 20)
    keep(kept, "a")

    assert not kept.enabled
    with pytest.raises(NotKept, match="HANDOFF_KV_SAVE_DIR is not set"):
        kept.open("a")

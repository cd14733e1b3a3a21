"""From what the user wrote (`--model`, HANDOFF_MODEL) to a checkpoint folder or a GGUF file on this machine.

    auto            the default hub model when it is cached or the hub answers at once, else the offline model
    a path          a checkpoint folder or a .gguf file; no network is touched
    owner/name      a repository on the Hugging Face hub

What `auto` found is written down in the cache, so that every process that shares the cache, and every later
start, takes the same model and asks nobody.
"""

from __future__ import annotations

import json
import re
from dataclasses import dataclass
from pathlib import Path

from shared.models.error import ModelError
from shared.models.files import missing_files, read_json
from shared.models.gguf_file import MAGIC
from shared.models.hub import cached_repository, fetch_repository, hub_answers
from shared.models.offline import fetch_offline_model, offline_model
from shared.models.store import Report, locked, write_whole

AUTO = "auto"
DEFAULT_REPOSITORY = "Qwen/Qwen2.5-0.5B-Instruct"

_HUB_ID = re.compile(r"^([\w.-]+/)?[\w.-]+$")
_HUB_WITHIN_S = 4.0
_CHOICE = "auto.json"


@dataclass(frozen=True)
class Located:
    """A model on this machine: its name for people, and the folder or GGUF file that holds it."""

    name: str
    path: Path

    @property
    def is_gguf(self) -> bool:
        """Whether `path` is a GGUF file; otherwise it is a checkpoint folder."""
        return self.path.is_file()


def locate(model: str, cache_dir: Path, report: Report, *, weights: bool = True) -> Located:
    """Find `model`, downloading it if it must be. weights False: the tokenizer and configs are enough.

    Raises ModelError.
    """
    if found := find(model, cache_dir, weights=weights):
        return found
    if model == AUTO:
        with locked(cache_dir, AUTO, report):
            return _fetch_auto(cache_dir, report, weights=weights)
    return Located(model, fetch_repository(model, weights=weights, report=report))


def find(model: str, cache_dir: Path, *, weights: bool = True) -> Located | None:
    """Find `model` on this machine; None if it must be downloaded first. Uses no network.

    Raises ModelError for what can be neither here nor elsewhere: a wrong path, an incomplete folder.
    """
    if model == AUTO:
        return _find_auto(cache_dir, weights=weights)
    if not model.strip():
        raise ModelError("no model is named")
    path = Path(model).expanduser()
    if path.is_dir():
        if missing := missing_files(path, weights=weights):
            raise ModelError(f"{model} is no checkpoint folder: {', '.join(missing)} is missing")
        return Located(path.resolve().name, path.resolve())
    if path.suffix == ".gguf" or path.is_file():
        _require_gguf(path)
        return Located(path.stem, path.resolve())
    if model.startswith((".", "~", "/")) or not _HUB_ID.match(model):
        raise ModelError(f"{model} is neither a folder, nor a .gguf file, nor the id of a hub model")
    return _find_on_hub(model, weights=weights)


def forget_auto(cache_dir: Path) -> None:
    """Let the next `auto` choose afresh."""
    (cache_dir / _CHOICE).unlink(missing_ok=True)


def _require_gguf(path: Path) -> None:
    try:
        with path.open("rb") as stream:
            begins = stream.read(len(MAGIC))
    except OSError as exc:
        raise ModelError(f"cannot read {path}: {exc.strerror}") from exc
    if begins != MAGIC:
        raise ModelError(f"{path} is neither a checkpoint folder nor a GGUF file")


def _find_on_hub(repo_id: str, *, weights: bool) -> Located | None:
    folder = cached_repository(repo_id, weights=weights)
    return Located(repo_id, folder) if folder else None


def _find_auto(cache_dir: Path, *, weights: bool) -> Located | None:
    """What an earlier `auto` chose, if it is still here."""
    path = cache_dir / _CHOICE
    chosen = read_json(path).get("model") if path.is_file() else None
    offline = offline_model()
    if chosen == offline.name and (cache_dir / offline.entry).is_file():
        return Located(offline.name, cache_dir / offline.entry)
    return _find_on_hub(DEFAULT_REPOSITORY, weights=weights) if chosen == DEFAULT_REPOSITORY else None


def _fetch_auto(cache_dir: Path, report: Report, *, weights: bool) -> Located:
    """Choose, download, and write the choice down. Under the lock: another process may just have done it."""
    if found := _find_auto(cache_dir, weights=weights):
        return found
    found = _find_on_hub(DEFAULT_REPOSITORY, weights=weights)
    if found is None and hub_answers(_HUB_WITHIN_S):
        try:
            folder = fetch_repository(DEFAULT_REPOSITORY, weights=weights, report=report)
            found = Located(DEFAULT_REPOSITORY, folder)
        except ModelError as exc:
            report(str(exc))
    if found is None:
        offline = offline_model()
        report(f"the hub cannot be reached; the offline model {offline.name} is used")
        found = Located(offline.name, fetch_offline_model(cache_dir, report))
    write_whole(cache_dir / _CHOICE, json.dumps({"model": found.name}).encode())
    return found

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
    if model == AUTO:
        with locked(cache_dir, AUTO, report):
            return _locate_auto(cache_dir, report, weights=weights)
    path = Path(model).expanduser()
    if path.is_dir():
        if missing := missing_files(path, weights=weights):
            raise ModelError(f"{model} is no checkpoint folder: {', '.join(missing)} is missing")
        return Located(path.resolve().name, path.resolve())
    if path.suffix == ".gguf" or path.is_file():
        if not path.is_file():
            raise ModelError(f"{model}: no such file")
        return Located(path.stem, path.resolve())
    if model.startswith((".", "~", "/")) or not _HUB_ID.match(model):
        raise ModelError(f"{model} is neither a folder, nor a .gguf file, nor the id of a hub model")
    return _locate_on_hub(model, report, weights=weights)


def forget_auto(cache_dir: Path) -> None:
    """Let the next `auto` choose afresh."""
    (cache_dir / _CHOICE).unlink(missing_ok=True)


def _locate_on_hub(repo_id: str, report: Report, *, weights: bool) -> Located:
    cached = cached_repository(repo_id, weights=weights)
    return Located(repo_id, cached or fetch_repository(repo_id, weights=weights, report=report))


def _locate_auto(cache_dir: Path, report: Report, *, weights: bool) -> Located:
    offline = offline_model()
    chosen = _read_choice(cache_dir)
    if chosen == offline.name:
        return Located(offline.name, fetch_offline_model(cache_dir, report))
    if chosen == DEFAULT_REPOSITORY:
        return _locate_on_hub(DEFAULT_REPOSITORY, report, weights=weights)
    try:
        found = _try_hub(report, weights=weights)
    except ModelError as exc:
        report(str(exc))
        found = None
    if found is None:
        report(f"the hub does not answer; using the offline model {offline.name}")
        found = Located(offline.name, fetch_offline_model(cache_dir, report))
    write_whole(cache_dir / _CHOICE, json.dumps({"model": found.name}).encode())
    return found


def _try_hub(report: Report, *, weights: bool) -> Located | None:
    if cached := cached_repository(DEFAULT_REPOSITORY, weights=weights):
        return Located(DEFAULT_REPOSITORY, cached)
    if not hub_answers(_HUB_WITHIN_S):
        return None
    return Located(DEFAULT_REPOSITORY, fetch_repository(DEFAULT_REPOSITORY, weights=weights, report=report))


def _read_choice(cache_dir: Path) -> str | None:
    path = cache_dir / _CHOICE
    return read_json(path).get("model") if path.is_file() else None

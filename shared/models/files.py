"""Which files make a checkpoint folder, which of them hold weights, and whether they are all there."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from shared.models.error import ModelError

INDEX = "model.safetensors.index.json"
SINGLE = "model.safetensors"
SMALL_FILES = (
    "config.json",
    "generation_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
)
WEIGHT_FILES = (SINGLE, INDEX, "model-*.safetensors")


def missing_files(folder: Path, *, weights: bool) -> list[str]:
    """Names of needed files that are not in `folder`; empty means that it is a usable checkpoint."""
    missing = [name for name in ("config.json", "tokenizer.json") if not (folder / name).is_file()]
    if weights:
        try:
            missing += [path.name for path in weight_files(folder) if not path.is_file()]
        except ModelError:
            missing.append(SINGLE)
    return missing


def weight_files(folder: Path) -> list[Path]:
    """The safetensors files of a checkpoint: one, or those that its index names, sorted.

    Raises ModelError if there is neither.
    """
    if (folder / SINGLE).is_file():
        return [folder / SINGLE]
    if (folder / INDEX).is_file():
        names = read_json(folder / INDEX).get("weight_map")
        if not isinstance(names, dict):
            raise ModelError(f"{folder / INDEX} has no weight map")
        return [folder / name for name in sorted(set(names.values()))]
    raise ModelError(f"{folder} has no weights in safetensors files")


def small_files(folder: Path) -> list[Path]:
    """The files of `folder` that hold no weights and are part of the checkpoint."""
    return [folder / name for name in SMALL_FILES if (folder / name).is_file()]


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises ModelError if it is absent, unreadable or something else."""
    try:
        content = json.loads(path.read_bytes())
    except (OSError, ValueError) as exc:
        raise ModelError(f"cannot read {path}: {exc}") from exc
    if not isinstance(content, dict):
        raise ModelError(f"cannot read {path}: not a JSON object")
    return content

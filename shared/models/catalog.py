"""What lies in the cache folder, for people."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from shared.models.files import read_json
from shared.models.prepare import ORIGIN


@dataclass(frozen=True)
class CachedModel:
    """One entry. kind: a dtype (ready to serve), `tokenizer` (for a router) or `download` (as it came)."""

    name: str
    kind: str
    size_bytes: int
    path: Path


def cached_models(cache_dir: Path) -> list[CachedModel]:
    """Every finished entry, by name and kind. Raises ModelError if one cannot be read."""
    found = [
        CachedModel(path.stem, "download", path.stat().st_size, path)
        for path in cache_dir.glob("downloads/*.gguf")
    ]
    for origin_path in cache_dir.glob(f"checkpoints/*/{ORIGIN}"):
        folder = origin_path.parent
        if folder.suffix == ".partial":
            continue
        origin = read_json(origin_path)
        size_bytes = sum(path.stat().st_size for path in folder.iterdir())
        found.append(CachedModel(str(origin["name"]), str(origin["kind"]), size_bytes, folder))
    return sorted(found, key=lambda entry: (entry.name, entry.kind))

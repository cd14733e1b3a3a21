"""`handoff kv size`: whose KV is meant, and what it weighs, as a table and as JSON."""

from __future__ import annotations

import difflib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.table import Table

from services.cli.kv_text import megabytes, one_line
from shared.kv.size import (
    KvArchitecture,
    UnknownArchitecture,
    architecture_of,
    find_model,
    known_models,
    kv_bytes,
)
from shared.models.error import ModelError
from shared.models.files import read_json

_MAX_CONFIG_BYTES = 16 * 1024 * 1024


def named_architecture(model: str) -> tuple[str, KvArchitecture]:
    """Name and architecture of a config.json, of the folder that holds one, or of a known model.

    Raises UnknownArchitecture.
    """
    path = Path(model)
    try:
        config = path / "config.json" if path.is_dir() else path
        if config.is_file():
            return one_line(path), _read(config)
    except OSError as exc:
        raise UnknownArchitecture(f"cannot read {one_line(path)}: {exc.strerror}") from exc
    known = find_model(model)
    if known is not None:
        return known.name, known.kv
    names = {known.name.lower(): known.name for known in known_models()}
    close = [names[name] for name in difflib.get_close_matches(model.lower(), names, n=3)]
    hint = f"did you mean {', '.join(close)}?" if close else "`handoff kv size` lists those that are known"
    raise UnknownArchitecture(f"no known model and no config.json: {one_line(path)}; {hint}")


def size_table(models: Sequence[tuple[str, KvArchitecture]], tokens: Sequence[int], itemsize: int) -> Table:
    """One row per model; itemsize: bytes of one number."""
    table = Table(caption="1 MB = 1,048,576 bytes; tensor bytes alone", caption_justify="left")
    table.add_column("model")
    table.add_column("attention")
    table.add_column(f"numbers per token, {itemsize} byte{'s' if itemsize > 1 else ''} each")
    table.add_column("bytes per token", justify="right")
    for num_tokens in tokens:
        table.add_column(f"{num_tokens:,} tokens", justify="right", no_wrap=True)
    for name, kv in models:
        sizes = [megabytes(kv_bytes(kv, num_tokens, itemsize)) for num_tokens in tokens]
        table.add_row(name, kv.attention, kv.formula, f"{kv_bytes(kv, 1, itemsize):,}", *sizes)
    return table


def sizes_as_json(
    models: Sequence[tuple[str, KvArchitecture]], tokens: Sequence[int], itemsize: int
) -> list[dict[str, Any]]:
    """The same in bytes."""
    return [
        {
            "model": name,
            "attention": kv.attention,
            "formula": kv.formula,
            "itemsize_bytes": itemsize,
            "bytes_per_token": kv_bytes(kv, 1, itemsize),
            "kv_bytes": {str(num_tokens): kv_bytes(kv, num_tokens, itemsize) for num_tokens in tokens},
        }
        for name, kv in models
    ]


def _read(config: Path) -> KvArchitecture:
    if config.stat().st_size > _MAX_CONFIG_BYTES:
        raise UnknownArchitecture(f"{one_line(config)} is too large for a config.json")
    try:
        return architecture_of(read_json(config))
    except UnknownArchitecture as exc:
        raise UnknownArchitecture(f"{one_line(config)}: {exc}") from exc
    except ModelError as exc:
        raise UnknownArchitecture(str(exc)) from exc
    except RecursionError as exc:
        raise UnknownArchitecture(f"{one_line(config)} is nested too deeply for a config.json") from exc

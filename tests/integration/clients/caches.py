"""Where clients that are no part of the environment are installed once."""

from __future__ import annotations

import os
from pathlib import Path


def client_cache(name: str) -> Path:
    """A folder that outlives the tests, made if it is missing."""
    root = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    folder = root / "handoff-test-clients" / name
    folder.mkdir(parents=True, exist_ok=True)
    return folder

"""The real 0.5B model, got the way `handoff up` gets it."""

from __future__ import annotations

import os
from pathlib import Path

from shared.models.prepare import ensure_checkpoint
from shared.models.store import default_cache_dir


def real_checkpoint() -> Path:
    """Its float32 folder, downloaded and converted if it is not in the cache yet. Takes minutes then."""
    model = os.environ.get("HANDOFF_MODEL", "auto")
    return ensure_checkpoint(model, "float32", default_cache_dir(os.environ), print)

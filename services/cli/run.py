"""Composition root of one process: settings are checked here once, then the process's own `main` takes over.

Imports stand inside the functions because a router must start without torch, and `--help` without anything.
"""

from __future__ import annotations

import difflib
import sys
from collections.abc import Callable, Mapping
from typing import Literal

from shared.importing import heavy_imports
from shared.settings import BAD_SETTINGS, BadSettings, ProcessSettings, names_of, unknown_names

Process = Literal["router", "prefill", "decode"]
Entry = Callable[[Mapping[str, str], frozenset[str]], int]


def settings_classes() -> dict[str, type[ProcessSettings]]:
    """The settings class of each process; together they are every HANDOFF_ name there is."""
    from router.settings import RouterSettings
    from services.decode.settings import DecodeSettings
    from services.prefill.settings import PrefillSettings

    return {"router": RouterSettings, "prefill": PrefillSettings, "decode": DecodeSettings}


def known_names() -> frozenset[str]:
    """Every HANDOFF_ name that some process reads."""
    return names_of(*settings_classes().values())


def check_names(environ: Mapping[str, str]) -> frozenset[str]:
    """Every known name, after a look that `environ` has no other. Raises BadSettings with the nearest name."""
    known = known_names()
    for name in unknown_names(environ, known):
        near = difflib.get_close_matches(name.upper(), known, n=1)
        raise BadSettings(f"unknown setting {name}" + (f", did you mean {near[0]}?" if near else ""))
    return known


def run_process(process: Process, environ: Mapping[str, str]) -> int:
    """Run one process until it ends; returns its exit status, 2 if its settings are no settings."""
    try:
        with heavy_imports():
            known = check_names(environ)
            entry = _entry(process)
        return entry(environ, known)
    except BadSettings as exc:
        print(f"handoff {process}: {exc}", file=sys.stderr)
        return BAD_SETTINGS


def _entry(process: Process) -> Entry:
    if process == "router":
        from router.__main__ import main
    elif process == "prefill":
        from services.prefill.__main__ import main
    else:
        from services.decode.__main__ import main
    return main

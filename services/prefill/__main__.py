"""Entry of the prefill process: settings, logs, secret, model, then serve."""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeAlias

from services.prefill.settings import PrefillSettings
from shared.worker.process import run_worker

if TYPE_CHECKING:
    from fastapi import FastAPI

    from shared.worker.assemble import Worker

    CreateApp: TypeAlias = Callable[[Worker, PrefillSettings, str], FastAPI]


def main(environ: Mapping[str, str], known: frozenset[str] = frozenset()) -> int:
    """Run until a signal; the exit code. known: HANDOFF_ names of other processes, no mistake here."""
    return run_worker("prefill", PrefillSettings, _load_app, environ, known)


def _load_app() -> CreateApp:
    from services.prefill.app import create_app  # noqa: PLC0415 - and torch with it

    return create_app


if __name__ == "__main__":
    sys.exit(main(os.environ))

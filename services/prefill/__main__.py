"""Entry of the prefill process: settings, logs, secret, model, then serve."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

from services.prefill.app import create_app
from services.prefill.settings import PrefillSettings
from shared.worker.process import run_worker


def main(environ: Mapping[str, str], known: frozenset[str] = frozenset()) -> int:
    """Run until a signal; the exit code. known: HANDOFF_ names of other processes, no mistake here."""
    return run_worker("prefill", PrefillSettings, create_app, environ, known)


if __name__ == "__main__":
    sys.exit(main(os.environ))

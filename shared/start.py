"""The beginning of every process: settings and secret from the environment, then logs and signals."""

from __future__ import annotations

from collections.abc import Mapping
from typing import TypeVar

import structlog

from shared.observability import setup_logging
from shared.secret import load_secret
from shared.server import exit_on_sigterm
from shared.settings import CommonSettings, load

NO_MODEL = 1
"""Exit code of a process that cannot get its checkpoint."""

_SECRETS = {"secret", "api_key"}
_log = structlog.get_logger(__name__)
S = TypeVar("S", bound=CommonSettings)


def read_settings(cls: type[S], environ: Mapping[str, str], known: frozenset[str]) -> tuple[S, str]:
    """Settings and the deployment's secret. known: names of other processes. Raises BadSettings."""
    settings = load(cls, environ, known)
    given = settings.secret.get_secret_value() if settings.secret else None
    return settings, load_secret(given, settings.secret_file)


def begin(settings: CommonSettings, *, service: str) -> None:
    """Logs and signals from here on, and the effective settings as the first line, without secrets."""
    setup_logging(settings.log_level, settings.log_format, service=service)
    exit_on_sigterm()
    _log.info("settings", **settings.model_dump(mode="json", exclude=_SECRETS))

"""A worker process from environment to exit code. The two roles differ in settings and app only.

Torch is loaded late: what can fail without it has not to wait for it.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, TypeVar

import structlog
from fastapi import FastAPI

from shared.importing import heavy_imports
from shared.models.error import ModelError
from shared.models.locate import locate
from shared.models.store import default_cache_dir
from shared.server import serve
from shared.settings import BAD_SETTINGS, BadSettings
from shared.start import NO_MODEL, begin, read_settings
from shared.wire import Role
from shared.worker.settings import WorkerSettings

if TYPE_CHECKING:
    from shared.worker.assemble import Worker

log = structlog.get_logger()
S = TypeVar("S", bound=WorkerSettings)

BROKEN = 3


def run_worker(
    role: Role,
    settings_class: type[S],
    load_app: Callable[[], Callable[[Worker, S, str], FastAPI]],
    environ: Mapping[str, str],
    known: frozenset[str],
) -> int:
    """load_app: imports and returns what makes the app; called once it is known that there is a model.

    Exit code: 0 stopped by a signal, 1 no model or address, 2 bad settings, 3 the engine broke.

    One clear line says why.
    """
    try:
        settings, secret = read_settings(settings_class, environ, known)
    except BadSettings as exc:
        print(f"handoff {role}: {exc}", file=sys.stderr)  # noqa: T201 - before there is a log
        return BAD_SETTINGS
    begin(settings, service=role)
    cache_dir = settings.cache_dir or default_cache_dir(environ)

    def report(line: str) -> None:
        log.info("model", step=line)

    try:
        locate(settings.model, cache_dir, report)  # torch takes seconds; a wrong name is told before
        with heavy_imports():
            from shared.worker.assemble import assemble  # noqa: PLC0415 - and torch with it

            create_app = load_app()
        worker = assemble(settings, role, cache_dir, report)
    except ModelError as exc:
        log.error("no_model", reason=str(exc))
        return NO_MODEL
    except BadSettings as exc:
        log.error("bad_settings", reason=str(exc))
        return BAD_SETTINGS
    # A device that has failed once answers nothing right any more; whoever started us starts us again.
    worker.engine.on_broken(lambda: os.kill(os.getpid(), signal.SIGTERM))
    app = create_app(worker, settings, secret)
    code = serve(
        app,
        host=settings.host,
        port=settings.port,
        drain_timeout_s=settings.drain_timeout_s,
        send_timeout_s=settings.send_timeout_s,
    )
    return code or (BROKEN if worker.engine.is_broken else 0)

"""Entry of the router process: settings, logs, secret, tokenizer, then serve."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping

import structlog

from router.app import create_app
from router.checkpoint import Checkpoint
from router.keys import is_open_to_others, load_keys
from router.settings import RouterSettings
from router.text.template import BadTemplate
from router.text.tokenizer import BadTokenizer
from shared.models.error import ModelError
from shared.models.prepare import ensure_tokenizer, model_name
from shared.models.store import default_cache_dir
from shared.server import serve
from shared.settings import BAD_SETTINGS, BadSettings
from shared.start import NO_MODEL, begin, read_settings

_log = structlog.get_logger(__name__)


def main(environ: Mapping[str, str], known: frozenset[str] = frozenset()) -> int:
    """Run until a signal; the exit code. known: HANDOFF_ names of other processes, no mistake here."""
    try:
        settings, secret = read_settings(RouterSettings, environ, known)
        if not settings.decode_urls:
            raise BadSettings("HANDOFF_DECODE_URLS: at least one decode worker is needed")
        keys = load_keys(settings)
    except BadSettings as exc:
        print(f"handoff router: {exc}", file=sys.stderr)  # noqa: T201 - before there is a log
        return BAD_SETTINGS
    begin(settings, service="router")
    if is_open_to_others(settings.host, keys):
        _log.warning(
            "open_to_anybody", host=settings.host, reason="neither HANDOFF_API_KEY nor a file of keys"
        )
    cache_dir = settings.cache_dir or default_cache_dir(environ)
    try:
        folder = ensure_tokenizer(settings.model, cache_dir, lambda line: _log.info("model", step=line))
        checkpoint = Checkpoint.load(folder, settings.served_model_name or model_name(folder))
    except (ModelError, BadTokenizer, BadTemplate) as exc:
        _log.error("no_model", reason=str(exc))
        return NO_MODEL
    app = create_app(settings, checkpoint, secret, keys=keys)
    return serve(
        app,
        host=settings.host,
        port=settings.port,
        drain_timeout_s=settings.drain_timeout_s,
        send_timeout_s=settings.send_timeout_s,
    )


if __name__ == "__main__":
    sys.exit(main(os.environ))

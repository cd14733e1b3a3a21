"""Options that several commands share. Light: `handoff --help` loads this."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated
from urllib.parse import urlsplit

import typer


def checked_url(url: str | None) -> str | None:
    """Raises typer.BadParameter for what no client could connect to: some of them would fail with a traceback."""
    if url is None:
        return None
    try:
        parts = urlsplit(url)
        is_url = parts.scheme in ("http", "https") and bool(parts.hostname) and parts.port != 0
    except ValueError as exc:
        raise typer.BadParameter(str(exc)) from exc
    if not is_url:
        raise typer.BadParameter("it must be http://host:port")
    return url


SecretFile = Annotated[
    Path | None,
    typer.Option(
        envvar="HANDOFF_SECRET_FILE",
        exists=True,
        dir_okay=False,
        help="File with the workers' shared secret; or set HANDOFF_SECRET.",
    ),
]

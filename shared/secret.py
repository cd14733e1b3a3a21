"""The secret that our processes share: given in the environment, or in a file that the first one creates."""

from __future__ import annotations

import os
import secrets
import tempfile
from pathlib import Path

from shared.settings import BadSettings

MIN_CHARS = 16


def load_secret(secret: str | None, secret_file: Path | None) -> str:
    """The secret of this deployment; `secret` wins over `secret_file`.

    A file that does not exist is created with a random secret, readable by its owner only. It appears whole
    or not at all, and of several processes that start together one creates it and all read the same.
    Raises BadSettings, whose text never holds the secret.
    """
    if secret is not None:
        return _checked(secret, "HANDOFF_SECRET")
    if secret_file is None:
        raise BadSettings("HANDOFF_SECRET or HANDOFF_SECRET_FILE must be set")
    try:
        try:
            content = secret_file.read_text()
        except FileNotFoundError:
            _create(secret_file)
            content = secret_file.read_text()
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not text"
        raise BadSettings(f"HANDOFF_SECRET_FILE: {secret_file}: {reason}") from exc
    return _checked(content.strip(), "HANDOFF_SECRET_FILE")


def _checked(secret: str, name: str) -> str:
    if len(secret) < MIN_CHARS:
        raise BadSettings(f"{name}: the secret must have at least {MIN_CHARS} characters")
    if not all("!" <= char <= "~" for char in secret):
        raise BadSettings(f"{name}: the secret may hold visible ASCII characters only")
    return secret


def _create(path: Path) -> None:
    """Write a random secret beside `path` and link it there; a link fails if another process was first."""
    path.parent.mkdir(parents=True, exist_ok=True)
    fd, draft = tempfile.mkstemp(prefix=f".{path.name}.", dir=path.parent)  # mode 0600
    try:
        with os.fdopen(fd, "w") as file:
            file.write(secrets.token_urlsafe(32) + "\n")
            file.flush()
            os.fsync(file.fileno())
        os.link(draft, path)
    except FileExistsError:
        return
    finally:
        os.unlink(draft)

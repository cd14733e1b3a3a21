"""The keys that clients may use: one in the environment, or several in a file."""

from __future__ import annotations

import ipaddress
from collections.abc import Sequence
from pathlib import Path

from router.settings import RouterSettings
from shared.settings import BadSettings

MIN_CHARS = 8


def load_keys(settings: RouterSettings) -> tuple[str, ...]:
    """Every accepted key; none at all means that the API is open. Raises BadSettings, which shows no key.

    The file has one key a line; empty lines and lines that begin with # are left out.
    """
    keys: list[str] = []
    if settings.api_key is not None:
        keys.append(_checked(settings.api_key.get_secret_value(), "HANDOFF_API_KEY"))
    if settings.api_key_file is not None:
        keys += _read(settings.api_key_file)
    return tuple(dict.fromkeys(keys))


def is_open_to_others(host: str, keys: Sequence[str]) -> bool:
    """May anybody beyond this machine use the API? host: the address to listen on; a name may be any."""
    if keys or host == "localhost":
        return False
    try:
        return not ipaddress.ip_address(host).is_loopback
    except ValueError:
        return True


def _read(path: Path) -> list[str]:
    name = f"HANDOFF_API_KEY_FILE: {path}"
    try:
        lines = [line.strip() for line in path.read_text().splitlines()]
    except (OSError, UnicodeDecodeError) as exc:
        reason = exc.strerror if isinstance(exc, OSError) else "not text"
        raise BadSettings(f"{name}: {reason}") from exc
    keys = [_checked(line, name) for line in lines if line and not line.startswith("#")]
    if not keys:  # a file that was emptied by mistake must not open the API
        raise BadSettings(f"{name}: holds no key")
    return keys


def _checked(key: str, name: str) -> str:
    if len(key) < MIN_CHARS or not all("!" <= char <= "~" for char in key):
        raise BadSettings(f"{name}: a key must be at least {MIN_CHARS} visible ASCII characters")
    return key

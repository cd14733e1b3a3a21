"""Base of the per-process settings: environment variables with the prefix HANDOFF_, read once at the start.

A value that does not parse, or a HANDOFF_ name that no process knows, stops the start with one clear line.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import TypeVar

from pydantic import ValidationError
from pydantic_settings import BaseSettings, SettingsConfigDict

PREFIX = "HANDOFF_"


class BadSettings(ValueError):
    """The environment cannot be read as settings; the text says which name and why, never the value."""


class ProcessSettings(BaseSettings):
    """Frozen settings of one process. Subclasses give every field a unit, bounds and a description."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore")


S = TypeVar("S", bound=ProcessSettings)


def names_of(*classes: type[ProcessSettings]) -> frozenset[str]:
    """The environment variables that these settings classes read."""
    return frozenset(PREFIX + field.upper() for cls in classes for field in cls.model_fields)


def unknown_names(environ: Mapping[str, str], known: Iterable[str]) -> list[str]:
    """HANDOFF_ variables in `environ` that are not in `known`, sorted."""
    wanted = frozenset(known)
    return sorted(n for n in environ if n.upper().startswith(PREFIX) and n.upper() not in wanted)


def load(cls: type[S], environ: Mapping[str, str], known: Iterable[str] = ()) -> S:
    """Read `cls` from `environ`. `known`: names that belong to other processes and are no mistake here.

    Raises BadSettings.
    """
    unknown = unknown_names(environ, names_of(cls) | frozenset(known))
    if unknown:
        raise BadSettings(f"unknown setting {', '.join(unknown)}")
    wanted = names_of(cls)
    values = {
        name.upper().removeprefix(PREFIX).lower(): value
        for name, value in environ.items()
        if name.upper() in wanted
    }
    try:
        return cls.model_validate_strings(values)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        name = PREFIX + str(first["loc"][0]).upper() if first["loc"] else "settings"
        raise BadSettings(f"{name}: {first['msg']}") from exc

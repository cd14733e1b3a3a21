"""Base of the per-process settings: environment variables with the prefix HANDOFF_, read once at the start.

A value that does not parse, or a HANDOFF_ name that no process knows, stops the start with one clear line. An empty
value is as good as none: compose files and unit files have no other way to leave a variable out.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Literal, TypeVar

from pydantic import Field, SecretStr, ValidationError
from pydantic_settings import BaseSettings, PydanticBaseSettingsSource, SettingsConfigDict

from shared.asgi.stall import SEND_TIMEOUT_S

PREFIX = "HANDOFF_"

BAD_SETTINGS = 2
"""Exit code of a process whose environment cannot be read as settings."""


class BadSettings(ValueError):
    """The environment cannot be read as settings; the text says which name and why, never the value."""


class ProcessSettings(BaseSettings):
    """Frozen settings of one process. Subclasses give every field a unit, bounds and a description."""

    model_config = SettingsConfigDict(env_prefix=PREFIX, frozen=True, extra="ignore")

    @classmethod
    def settings_customise_sources(
        cls,
        settings_cls: type[BaseSettings],  # noqa: ARG003 - the signature is pydantic's
        init_settings: PydanticBaseSettingsSource,
        env_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        dotenv_settings: PydanticBaseSettingsSource,  # noqa: ARG003
        file_secret_settings: PydanticBaseSettingsSource,  # noqa: ARG003
    ) -> tuple[PydanticBaseSettingsSource, ...]:
        """Only what `load` hands over: else pydantic reads os.environ once more, past our checks."""
        return (init_settings,)


class CommonSettings(ProcessSettings):
    """What every process has: the checkpoint, where to listen, the shared secret, logs, draining."""

    model: str = Field(
        "auto", min_length=1, description="Checkpoint: a folder, a hub id, a .gguf file, or auto."
    )
    cache_dir: Path | None = Field(
        None,
        description="Where downloaded and prepared checkpoints are kept; empty: the user's cache folder.",
    )
    host: str = Field("127.0.0.1", min_length=1, description="Address to listen on.")
    port: int = Field(0, ge=0, le=65535, description="Port to listen on; 0 takes any free one.")
    secret: SecretStr | None = Field(
        None,
        description="Shared by all processes: the bearer key of every worker route, and signs KV tickets.",
    )
    secret_file: Path | None = Field(
        None, description="File that holds the secret; made with a random one if it does not exist."
    )
    log_level: Literal["debug", "info", "warning", "error"] = Field(
        "info", description="Lowest level that is logged."
    )
    log_format: Literal["auto", "json", "console"] = Field(
        "auto", description="auto is console on a terminal, else JSON."
    )
    send_timeout_s: float = Field(
        SEND_TIMEOUT_S,
        gt=0,
        le=86_400,
        description="Seconds in which whoever is answered may take nothing of the answer; then it is cut off.",
    )
    drain_timeout_s: float = Field(
        30.0, ge=0, le=3600, description="Seconds that running requests get after SIGTERM."
    )


S = TypeVar("S", bound=ProcessSettings)


def names_of(*classes: type[ProcessSettings]) -> frozenset[str]:
    """The environment variables that these settings classes read."""
    return frozenset(PREFIX + field.upper() for cls in classes for field in cls.model_fields)


def unknown_names(environ: Mapping[str, str], known: Iterable[str]) -> list[str]:
    """HANDOFF_ variables in `environ` that are not in `known`, sorted."""
    wanted = frozenset(known)
    return sorted(n for n in environ if n.upper().startswith(PREFIX) and n.upper() not in wanted)


def without_empty(environ: Mapping[str, str]) -> dict[str, str]:
    """`environ` less the HANDOFF_ variables that are set to nothing."""
    return {name: value for name, value in environ.items() if value or not name.upper().startswith(PREFIX)}


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
        for name, value in without_empty(environ).items()
        if name.upper() in wanted
    }
    try:
        return cls.model_validate_strings(values)
    except ValidationError as exc:
        first = exc.errors(include_url=False, include_input=False)[0]
        name = PREFIX + str(first["loc"][0]).upper() if first["loc"] else "settings"
        raise BadSettings(f"{name}: {first['msg']}") from exc

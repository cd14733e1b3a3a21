"""The table of every setting, made from the settings classes themselves."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from pydantic import SecretStr
from pydantic.fields import FieldInfo

from shared.settings import PREFIX, ProcessSettings

_UNITS = {"_bytes": "bytes", "_s": "seconds", "_chars": "characters"}
_BOUNDS = {"ge": "≥", "gt": ">", "le": "≤", "lt": "<"}


@dataclass(frozen=True)
class SettingRow:
    """One HANDOFF_ name. `processes`: who reads it; `limits`: unit and bounds, "" if it has none."""

    processes: str
    name: str
    default: str
    limits: str
    description: str


def rows(classes: Mapping[str, type[ProcessSettings]]) -> list[SettingRow]:
    """One row for each name and meaning, common names first, in the order of their declaration."""
    readers: dict[tuple[str, str, str, str], list[str]] = {}
    for process, cls in classes.items():
        for field, info in cls.model_fields.items():
            key = (PREFIX + field.upper(), _default(info), _limits(field, info), info.description or "")
            readers.setdefault(key, []).append(process)
    found = [SettingRow(", ".join(who), *key) for key, who in readers.items()]
    return sorted(found, key=lambda row: -row.processes.count(","))


def markdown(table: Iterable[SettingRow]) -> str:
    """The rows as a GitHub table."""
    lines = ["| setting | processes | default | limits | meaning |", "|---|---|---|---|---|"]
    for row in table:
        meaning = row.description.replace("|", r"\|")
        lines.append(f"| `{row.name}` | {row.processes} | {row.default} | {row.limits} | {meaning} |")
    return "\n".join(lines)


def plain(table: Iterable[SettingRow]) -> str:
    """The rows for a terminal: a name with its facts, its meaning below."""
    return "\n".join(
        f"{row.name}  [{row.processes}]  default: {row.default}"
        + (f"  ({row.limits})" if row.limits else "")
        + f"\n    {row.description}"
        for row in table
    )


def _default(info: FieldInfo) -> str:
    value = info.get_default(call_default_factory=False)
    if info.is_required():
        return "required"
    if value is None or value == () or value == "" or isinstance(value, SecretStr):
        return "none"
    if isinstance(value, bool):
        return str(value).lower()
    return ", ".join(map(str, value)) if isinstance(value, tuple) else str(value)


def _limits(field: str, info: FieldInfo) -> str:
    unit = next((text for suffix, text in _UNITS.items() if field.endswith(suffix)), "")
    bounds = [
        f"{sign} {getattr(rule, name)}"
        for rule in info.metadata
        for name, sign in _BOUNDS.items()
        if getattr(rule, name, None) is not None
    ]
    return ", ".join(filter(None, [unit, *bounds]))

"""The settings table is made from the classes."""

from __future__ import annotations

from pydantic import Field, SecretStr

from services.cli.run import settings_classes
from services.cli.settings_table import markdown, plain, rows
from shared.settings import ProcessSettings


class _One(ProcessSettings):
    port: int = Field(80, ge=0, le=65535, description="Where to listen.")
    wait_s: float = Field(1.5, gt=0, description="How long.")
    secret: SecretStr | None = Field(None, description="Hidden.")


class _Two(ProcessSettings):
    port: int = Field(80, ge=0, le=65535, description="Where to listen.")
    wait_s: float = Field(2.5, gt=0, description="How long.")
    mode: str = Field("a", description="a|b")
    names: tuple[str, ...] = Field((), description="Several.")
    on: bool = Field(False, description="Or off.")


def test_names_with_one_meaning_share_a_row() -> None:
    """A name that two processes read alike is told once; with another default it is told again."""
    table = rows({"one": _One, "two": _Two})
    assert ("one, two", "HANDOFF_PORT", "80", "≥ 0, ≤ 65535", "Where to listen.") == (
        table[0].processes,
        table[0].name,
        table[0].default,
        table[0].limits,
        table[0].description,
    )
    waits = [row for row in table if row.name == "HANDOFF_WAIT_S"]
    assert [("one", "1.5"), ("two", "2.5")] == [(row.processes, row.default) for row in waits]
    assert {"seconds, > 0"} == {row.limits for row in waits}


def test_defaults_read_as_a_user_would_write_them() -> None:
    """Nothing of Python shows: no None, no tuple, no False."""
    defaults = {row.name: row.default for row in rows({"one": _One, "two": _Two})}
    assert ("none", "none", "false") == tuple(defaults[f"HANDOFF_{n}"] for n in ("SECRET", "NAMES", "ON"))


def test_markdown_keeps_its_columns() -> None:
    """A bar inside a text does not open a column."""
    lines = markdown(rows({"two": _Two})).splitlines()
    assert {6} == {line.replace(r"\|", "").count("|") for line in lines}


def test_every_setting_of_ours_is_described() -> None:
    """A name without a meaning is of no use in a table."""
    table = rows(settings_classes())
    assert [] == [row.name for row in table if not row.description]
    assert len(plain(table).splitlines()) == 2 * len(table)

"""Settings from the environment: everything understood, or one clear line."""

from __future__ import annotations

import pytest
from pydantic import Field, ValidationError

from shared.settings import BadSettings, ProcessSettings, load, names_of, unknown_names, without_empty


class Example(ProcessSettings):
    """A process with one number, one text and one optional number."""

    port: int = Field(default=8000, ge=0, le=65535)
    model: str = "auto"
    timeout_s: float | None = None


def test_defaults_hold_when_nothing_is_set() -> None:
    """An empty environment is a valid one."""
    assert (8000, "auto", None) == (lambda s: (s.port, s.model, s.timeout_s))(load(Example, {}))


def test_values_are_read_by_name_whatever_the_case() -> None:
    """HANDOFF_PORT and handoff_port name the same setting, and other variables are left alone."""
    settings = load(Example, {"HANDOFF_PORT": "81", "handoff_timeout_s": "1.5", "PORT": "x", "PATH": "/bin"})
    assert (81, 1.5) == (settings.port, settings.timeout_s)


def test_only_the_given_environment_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    """What this very process finds around it does not leak in."""
    monkeypatch.setenv("HANDOFF_PORT", "99")
    assert 8000 == load(Example, {}).port


def test_an_unknown_name_stops_the_start() -> None:
    """A misspelt setting is never silently ignored."""
    with pytest.raises(BadSettings, match="HANDOFF_PROT"):
        load(Example, {"HANDOFF_PROT": "1"})


def test_names_of_other_processes_are_no_mistake() -> None:
    """One environment can serve all processes of a host."""
    assert 1 == load(Example, {"HANDOFF_PORT": "1", "HANDOFF_DTYPE": "x"}, known={"HANDOFF_DTYPE"}).port


@pytest.mark.parametrize("name", ["HANDOFF_PORT", "HANDOFF_MODEL", "handoff_timeout_s"])
def test_an_empty_value_is_none(name: str) -> None:
    """Compose files give empty text for what nobody set; it once stopped the start."""
    assert load(Example, {}) == load(Example, {name: ""})


def test_only_our_own_empty_variables_are_left_out() -> None:
    """What else is in the environment is not ours to judge."""
    environ = {"HANDOFF_API_KEY": "", "handoff_x": "", "HANDOFF_PORT": "1", "CUDA_VISIBLE_DEVICES": ""}
    assert {"HANDOFF_PORT": "1", "CUDA_VISIBLE_DEVICES": ""} == without_empty(environ)


@pytest.mark.parametrize("value", [" ", "eighty", "-1", "65536", "1.5"])
def test_a_value_that_does_not_parse_stops_the_start(value: str) -> None:
    """The text names the variable, in one line."""
    with pytest.raises(BadSettings, match=r"^HANDOFF_PORT: ") as caught:
        load(Example, {"HANDOFF_PORT": value})
    assert "\n" not in str(caught.value)


def test_the_value_itself_is_not_shown() -> None:
    """It could be a secret that was put into the wrong variable."""
    with pytest.raises(BadSettings) as caught:
        load(Example, {"HANDOFF_PORT": "hunter2-hunter2"})
    assert "hunter2" not in str(caught.value)


def test_settings_are_frozen() -> None:
    """Nobody changes them after the start."""
    with pytest.raises(ValidationError):
        load(Example, {}).port = 1  # type: ignore[misc]


def test_names_of_and_unknown_names_agree() -> None:
    """The names of a class are exactly those that are not unknown."""
    known = names_of(Example)
    assert {"HANDOFF_PORT", "HANDOFF_MODEL", "HANDOFF_TIMEOUT_S"} == set(known)
    assert ["HANDOFF_X"] == unknown_names({"HANDOFF_X": "", "HANDOFF_PORT": "", "OTHER": ""}, known)

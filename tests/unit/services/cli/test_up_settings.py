"""What `handoff up` refuses before it fetches a model, and the secret that it gives its children."""

from __future__ import annotations

from pathlib import Path

import pytest

from services.cli.plan import Host, Options, plan
from services.cli.up_settings import check_settings, secret_of
from shared.secret import load_secret
from shared.settings import BadSettings

TWO_CORES = Host(cores=(0, 1), ports=(9001, 9002))
GIB = 1 << 30


def _check(environ: dict[str, str], host: Host = TWO_CORES) -> tuple[str, ...]:
    return check_settings(plan(Options(), host, environ, secret=secret_of(environ)), environ, host)


def test_children_have_the_secret_of_the_users_file(tmp_path: Path) -> None:
    """Each once got a random one beside the file, so `handoff doctor` with that file was refused."""
    file = tmp_path / "secret"
    file.write_text("the-secret-of-the-file\n")
    environ = {"HANDOFF_SECRET_FILE": str(file)}
    specs = plan(Options(), TWO_CORES, environ, secret=secret_of(environ))
    assert {"the-secret-of-the-file"} == {
        load_secret(spec.environ["HANDOFF_SECRET"], Path(spec.environ["HANDOFF_SECRET_FILE"]))
        for spec in specs
    }


def test_a_secret_file_that_is_absent_is_made(tmp_path: Path) -> None:
    """As every process does it: the file then holds what the children were given."""
    file = tmp_path / "secret"
    assert secret_of({"HANDOFF_SECRET_FILE": str(file)}) == file.read_text().strip()


def test_the_secret_itself_wins_over_the_file_and_without_both_it_is_random(tmp_path: Path) -> None:
    """The file is not even looked at; two deployments never share a random secret."""
    environ = {"HANDOFF_SECRET": "given-in-person-123", "HANDOFF_SECRET_FILE": str(tmp_path)}
    assert "given-in-person-123" == secret_of(environ)
    assert secret_of({}) != secret_of({})


@pytest.mark.parametrize(
    "environ",
    [
        {"HANDOFF_SECRET": "short"},
        {"HANDOFF_SECRET": "with spaces in it, long enough"},
        {"HANDOFF_SECRET_FILE": "/"},
        {"HANDOFF_CPUS": "4000"},
        {"HANDOFF_CPUS": "0-2"},
    ],
)
def test_what_every_process_would_refuse_is_found_at_once(environ: dict[str, str]) -> None:
    """All of these were once found only by the workers, after the model had been fetched and converted."""
    (name,) = environ
    with pytest.raises(BadSettings, match=f"^{name}: "):
        _check(environ)


def test_a_short_secret_of_the_plan_is_found() -> None:
    """Wherever it comes from."""
    specs = plan(Options(), TWO_CORES, {}, secret="short")
    with pytest.raises(BadSettings, match=r"^HANDOFF_SECRET: "):
        check_settings(specs, {}, TWO_CORES)


def test_a_card_that_is_not_here_is_found_where_any_is_seen() -> None:
    """If none is, the driver's tool may be missing: then the worker is asked."""
    environ = {"HANDOFF_DEVICE": "cuda:2"}
    two_cards = Host(cores=(0, 1), ports=(1, 2), gpus=(GIB, GIB))
    with pytest.raises(BadSettings, match=r"^HANDOFF_DEVICE: there is no cuda:2 here"):
        _check(environ, two_cards)
    assert () == _check({"HANDOFF_DEVICE": "cuda:1"}, two_cards)
    assert () == _check(environ)


def test_cores_that_are_here_are_accepted_and_keys_returned() -> None:
    """Nothing to complain about."""
    assert ("key-0123456789",) == _check({"HANDOFF_CPUS": "0-1", "HANDOFF_API_KEY": "key-0123456789"})

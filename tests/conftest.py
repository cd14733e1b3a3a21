"""What every test shares. Fixtures of one piece live beside its tests, helpers in `tests/support`."""

from __future__ import annotations

import os

import pytest
import structlog
from hypothesis import settings

from shared.settings import PREFIX


def pytest_addoption(parser: pytest.Parser) -> None:
    """`--stress`: `make stress`."""
    parser.addoption(
        "--stress", action="store_true", help="many more rounds of the tests that abort and kill at random"
    )


def pytest_configure() -> None:
    """No example is too slow: on a busy machine any may be. In CI the library's own profile goes on otherwise."""
    settings.register_profile("handoff", settings(deadline=None))
    settings.load_profile("handoff")


@pytest.fixture(autouse=True)
def _own_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the developer's own HANDOFF_ variables out of the tests."""
    for name in list(os.environ):
        if name.startswith(PREFIX) and name not in {"HANDOFF_CACHE_DIR", "HANDOFF_MODEL"}:
            monkeypatch.delenv(name)


@pytest.fixture(autouse=True)
def _quiet_servers() -> None:
    """Servers in threads must not write into what a test captures. Tests of logs set up their own.

    Before each test, as these reset it.
    """
    structlog.configure(logger_factory=structlog.ReturnLoggerFactory())

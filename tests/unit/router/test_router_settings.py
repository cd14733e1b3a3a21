"""The router's settings as they come from the environment."""

from __future__ import annotations

import pytest

from router.settings import RouterSettings
from shared.settings import BadSettings, load


def test_worker_urls_are_split_and_cleaned() -> None:
    """Commas separate; trailing slashes, blanks and repetitions go."""
    settings = load(RouterSettings, {"HANDOFF_DECODE_URLS": "http://a:1/, http://b:2,,http://a:1"})
    assert ("http://a:1", "http://b:2") == settings.decode_urls
    assert () == settings.prefill_urls


@pytest.mark.parametrize(
    ("name", "value"),
    [("DECODE_URLS", "a:1"), ("MAX_TRIES", "0"), ("REQUEST_TIMEOUT_S", "nan"), ("HEALTH_INTERVAL_S", "-1")],
)
def test_values_out_of_bounds_stop_the_start(name: str, value: str) -> None:
    """The error names the variable."""
    with pytest.raises(BadSettings, match=f"HANDOFF_{name}"):
        load(RouterSettings, {f"HANDOFF_{name}": value})


def test_every_field_is_described() -> None:
    """The settings table is made from the descriptions."""
    assert [] == [name for name, field in RouterSettings.model_fields.items() if not field.description]


def test_reused_connections_are_younger_than_the_servers_keep_them() -> None:
    """Time-outs stand in one order, so that no stage waits for what an outer one has given up."""
    settings = RouterSettings()
    assert settings.connect_timeout_s < settings.reserve_timeout_s < settings.request_timeout_s
    assert settings.recovery_wait_s < settings.request_timeout_s

"""The compose files and the Dockerfile, as far as they can be checked without a Docker engine."""

from __future__ import annotations

import json
import re
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema
import pytest
import yaml

from services.cli.run import known_names, settings_classes
from shared.settings import load

ROOT = Path(__file__).parents[2]
GPU_FILE = ROOT / "docker-compose.yml"
CPU_FILE = ROOT / "docs" / "compose.cpu.yml"
SCHEMA = Path(__file__).parent / "compose_spec" / "compose-spec.json"
ROLES = ["decode", "prefill", "router"]

_RESET = object()


class _Loader(yaml.SafeLoader):
    """YAML with Compose's `!reset`, which takes away what the file below says."""


_Loader.add_constructor("!reset", lambda _loader, _node: _RESET)


def _read(path: Path) -> dict[str, Any]:
    content: dict[str, Any] = yaml.load(path.read_text(), _Loader)
    return content


def _laid_over(below: Any, above: Any) -> Any:
    """Compose's merge for what these files use: mappings merge, anything else replaces, `!reset` removes."""
    if not (isinstance(below, dict) and isinstance(above, dict)):
        return above
    merged = below | {key: _laid_over(below.get(key), value) for key, value in above.items()}
    return {key: value for key, value in merged.items() if value is not _RESET}


def _filled(value: Any, variables: dict[str, str]) -> Any:
    """Replace ${NAME:-default} in every text."""
    if isinstance(value, dict):
        return {key: _filled(item, variables) for key, item in value.items()}
    if isinstance(value, list):
        return [_filled(item, variables) for item in value]
    if isinstance(value, str):
        return re.sub(r"\$\{(\w+):-([^}]*)\}", partial(_variable, variables), value)
    return value


def _variable(variables: dict[str, str], match: re.Match[str]) -> str:
    return variables.get(match[1], match[2])


def _gpu(**variables: str) -> dict[str, Any]:
    filled: dict[str, Any] = _filled(_read(GPU_FILE), variables)
    return filled


def _cpu(**variables: str) -> dict[str, Any]:
    filled: dict[str, Any] = _filled(_laid_over(_read(GPU_FILE), _read(CPU_FILE)), variables)
    return filled


VARIANTS = pytest.mark.parametrize("compose", [_gpu(), _cpu()], ids=["gpu", "cpu"])


@VARIANTS
def test_it_follows_the_compose_specification(compose: dict[str, Any]) -> None:
    """Both variants are valid under the JSON schema of the Compose Specification."""
    jsonschema.validate(compose, json.loads(SCHEMA.read_text()), jsonschema.Draft202012Validator)


def test_the_schema_refuses_what_compose_does() -> None:
    """The check above can fail: a misspelt key is refused."""
    compose = _gpu()
    compose["services"]["router"]["comand"] = ["router"]
    with pytest.raises(jsonschema.ValidationError, match="comand"):
        jsonschema.validate(compose, json.loads(SCHEMA.read_text()), jsonschema.Draft202012Validator)


def test_each_worker_asks_for_the_gpu_its_variable_names() -> None:
    """Separate cards by default, any by variable, both on one card if told so, and none for the router."""

    def cards(compose: dict[str, Any]) -> list[list[str]]:
        services = compose["services"]
        return [
            device["device_ids"]
            for role in ("prefill", "decode")
            for device in services[role]["deploy"]["resources"]["reservations"]["devices"]
        ]

    assert [["0"], ["1"]] == cards(_gpu())
    assert [["2"], ["2"]] == cards(_gpu(PREFILL_GPU="2", DECODE_GPU="2"))
    assert "deploy" not in _gpu()["services"]["router"]


def test_the_cpu_variant_has_no_gpu_block() -> None:
    """A host without the NVIDIA runtime would refuse to start it otherwise."""
    compose = _cpu()
    assert "nvidia" not in json.dumps(compose)
    assert [] == [name for name, service in compose["services"].items() if "deploy" in service]
    assert {"handoff:cpu"} == {service["image"] for service in compose["services"].values()}
    assert {"cpu"} == {service["build"]["args"]["TORCH"] for service in compose["services"].values()}


@VARIANTS
def test_every_service_starts_with_good_settings(compose: dict[str, Any]) -> None:
    """Each service's command is its role, and its environment is what that process accepts."""
    services = compose["services"]
    assert ROLES == sorted(services)
    for role, service in services.items():
        environ = {name: value for name, value in service["environment"].items() if value is not None}
        load(settings_classes()[role], environ, known_names())
        assert [role] == service["command"]
        assert {name for name in service["environment"] if name.startswith("HANDOFF_")} <= known_names()


@VARIANTS
def test_the_router_waits_for_workers_that_it_can_reach(compose: dict[str, Any]) -> None:
    """It starts when both are ready, and its URLs name their services and ports."""
    router = compose["services"]["router"]
    assert {"prefill", "decode"} == {
        name for name, needs in router["depends_on"].items() if needs["condition"] == "service_healthy"
    }
    for role in ("prefill", "decode"):
        worker = compose["services"][role]["environment"]
        assert "0.0.0.0" == worker["HANDOFF_HOST"]
        assert (
            f"http://{role}:{worker['HANDOFF_PORT']}" == router["environment"][f"HANDOFF_{role.upper()}_URLS"]
        )


@VARIANTS
def test_stopping_leaves_time_to_drain(compose: dict[str, Any]) -> None:
    """Compose kills after the grace period; draining must end before."""
    for service in compose["services"].values():
        grace_s = float(service["stop_grace_period"].removesuffix("s"))
        assert float(service["environment"]["HANDOFF_DRAIN_TIMEOUT_S"]) < grace_s
        assert service["init"] is True


@VARIANTS
def test_health_checks_ask_our_own_command(compose: dict[str, Any]) -> None:
    """No curl is in the image: the check is `handoff health` on the port that the process listens on."""
    for service in compose["services"].values():
        port = service["environment"]["HANDOFF_PORT"]
        assert ["CMD", "handoff", "health", f"http://127.0.0.1:{port}/ready"] == service["healthcheck"][
            "test"
        ]


@VARIANTS
def test_processes_share_the_models_and_the_secret_only(compose: dict[str, Any]) -> None:
    """Every service mounts both volumes, the secret's file lies in one, and only the router is published."""
    for role, service in compose["services"].items():
        targets = dict(volume.split(":") for volume in service["volumes"])
        assert set(compose["volumes"]) == set(targets)
        assert targets["secret"] == str(Path(service["environment"]["HANDOFF_SECRET_FILE"]).parent)
        assert (role == "router") == ("ports" in service)

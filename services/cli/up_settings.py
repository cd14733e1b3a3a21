"""What `handoff up` checks before it fetches a model: the settings of all its children, and their secret."""

from __future__ import annotations

import secrets
from collections.abc import Mapping, Sequence
from pathlib import Path

from router.keys import load_keys
from router.settings import RouterSettings
from services.cli.plan import ChildSpec, Host
from services.cli.run import check_names, settings_classes
from shared.secret import load_secret
from shared.settings import BadSettings, load
from shared.worker.settings import WorkerSettings, parse_cpus


def secret_of(environ: Mapping[str, str]) -> str:
    """The secret of all children: the user's, which `handoff doctor` and `kv` know too, else a random one.

    Raises BadSettings.
    """
    secret, file = environ.get("HANDOFF_SECRET"), environ.get("HANDOFF_SECRET_FILE")
    if secret is None and file is None:
        return secrets.token_urlsafe(32)
    return load_secret(secret, Path(file) if file is not None else None)


def check_settings(specs: Sequence[ChildSpec], environ: Mapping[str, str], host: Host) -> tuple[str, ...]:
    """Raise BadSettings for what any of the processes would refuse; the keys that clients may use.

    What depends on the model, such as the size of a block, only the worker can tell.
    """
    known = check_names(environ)
    classes = settings_classes()
    keys: tuple[str, ...] = ()
    for spec in specs:
        settings = load(classes[spec.role], spec.environ, known)
        load_secret(spec.environ["HANDOFF_SECRET"], None)
        if isinstance(settings, RouterSettings):
            keys = load_keys(settings)
        if isinstance(settings, WorkerSettings):
            _check_devices(settings, host)
    return keys


def _check_devices(settings: WorkerSettings, host: Host) -> None:
    """Cores and GPU are here. No GPU that we see proves nothing: the driver's tool may be missing."""
    if settings.cpus is not None and not parse_cpus(settings.cpus) <= set(host.cores):
        raise BadSettings("HANDOFF_CPUS: names a core that this process may not use")
    _, _, index = settings.device.partition(":")
    if host.gpus and int(index or 0) >= len(host.gpus):
        raise BadSettings(f"HANDOFF_DEVICE: there is no {settings.device} here")

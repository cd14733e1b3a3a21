"""Facts about this machine that `handoff up` plans with: cores, GPUs, ports."""

from __future__ import annotations

import os
import socket
import subprocess
from collections.abc import Mapping
from contextlib import ExitStack

from services.cli.plan import LOOPBACK, Host


def look_at_host(environ: Mapping[str, str], *, num_ports: int) -> Host:
    """The cores this process may use, the GPUs it can see, and ports that are free now."""
    return Host(
        cores=tuple(sorted(os.sched_getaffinity(0))),
        ports=free_ports(num_ports),
        num_gpus=count_gpus(environ),
    )


def count_gpus(environ: Mapping[str, str]) -> int:
    """NVIDIA GPUs that a child would see; asked of the driver's own tool, because torch takes seconds to load."""
    try:
        found = subprocess.run(["nvidia-smi", "-L"], capture_output=True, text=True, timeout=20, check=True)  # noqa: S607 - found by PATH on purpose
    except (OSError, subprocess.SubprocessError):
        return 0
    num_gpus = sum(line.startswith("GPU ") for line in found.stdout.splitlines())
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    return num_gpus if visible is None else min(num_gpus, len([v for v in visible.split(",") if v.strip()]))


def free_ports(number: int) -> tuple[int, ...]:
    """Distinct ports on the loopback address that nobody listens on."""
    with ExitStack() as held:
        sockets = [held.enter_context(socket.socket()) for _ in range(number)]
        for one in sockets:
            one.bind((LOOPBACK, 0))
        return tuple(one.getsockname()[1] for one in sockets)


def why_not_listen(host: str, port: int) -> str | None:
    """None if a server could listen there now, else the reason."""
    try:
        family, kind, proto, _, address = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM)[0]
        with socket.socket(family, kind, proto) as probe:
            probe.setsockopt(
                socket.SOL_SOCKET, socket.SO_REUSEADDR, 1
            )  # as servers do: old connections may linger
            probe.bind(address)
    except OSError as exc:
        return exc.strerror or str(exc)
    return None

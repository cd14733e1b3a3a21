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
        gpus=look_at_gpus(environ),
    )


def look_at_gpus(environ: Mapping[str, str]) -> tuple[int, ...]:
    """Free bytes of each NVIDIA GPU that a child would see, in its order.

    The driver's own tool is asked: torch would take seconds to load.
    """
    query = ["nvidia-smi", "--query-gpu=memory.free", "--format=csv,noheader,nounits"]
    try:
        answer = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    return visible_gpus(answer, environ.get("CUDA_VISIBLE_DEVICES"))


def visible_gpus(answer: str, visible: str | None) -> tuple[int, ...]:
    """Free bytes from nvidia-smi's MiB per line, for the devices that CUDA_VISIBLE_DEVICES names, if set."""
    free = [int(line) << 20 if line.strip().isdigit() else 0 for line in answer.splitlines() if line.strip()]
    if visible is None:
        return tuple(free)
    names = [name.strip() for name in visible.split(",") if name.strip()]
    if all(name.isdigit() and int(name) < len(free) for name in names):
        return tuple(free[int(name)] for name in names)
    return tuple(free[: len(names)])  # named by UUID: how many is known, and equal cards are the rule


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
    except UnicodeError:  # of the name's encoding, which getaddrinfo does
        return "this is no host name"
    return None

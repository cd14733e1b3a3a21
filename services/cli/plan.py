"""What `handoff up` starts: pure functions from options and facts about the host to a list of children.

Each worker gets its own cores and, where there are several, its own GPU: two compute teams that share cores are
several times slower than one thread each. What the user set in the environment is passed on as it is, unless it
leaves the choice to us.
"""

from __future__ import annotations

import re
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from pathlib import Path
from typing import Literal

Role = Literal["prefill", "decode", "router"]

LOOPBACK = "127.0.0.1"
RECOVERY_WAIT_S = 120
"""A worker that was killed is started again here, and that takes as long as loading its model does."""

# HANDOFF_DEVICE that names no card. To a worker it is the first one, whoever else is there.
_ANY_GPU = ("auto", "cuda")


@dataclass(frozen=True)
class Options:
    """What the user asked for. num_prefill 0: unified mode. threads_per_worker None: one per core it owns."""

    model: str = "auto"
    host: str = LOOPBACK
    port: int = 8000
    num_prefill: int = 1
    num_decode: int = 1
    threads_per_worker: int | None = None

    @property
    def workers(self) -> list[tuple[Role, str]]:
        """Role and name of every worker, prefill first."""
        prefill: list[tuple[Role, str]] = [("prefill", f"prefill-{i}") for i in range(self.num_prefill)]
        return prefill + [("decode", f"decode-{i}") for i in range(self.num_decode)]


@dataclass(frozen=True)
class Host:
    """Facts about this machine.

    cores: the CPU numbers we may use; ports: free ones, one for each worker; gpus: free bytes of each GPU.
    """

    cores: tuple[int, ...]
    ports: tuple[int, ...]
    gpus: tuple[int, ...] = ()


@dataclass(frozen=True)
class ChildSpec:
    """One process to keep running. It is ready when `ready_url` answers with 2xx."""

    role: Role
    name: str
    argv: tuple[str, ...]
    environ: Mapping[str, str]
    ready_url: str


def plan(options: Options, host: Host, environ: Mapping[str, str], *, secret: str) -> list[ChildSpec]:
    """Every child in the order of starting, the router last."""
    common = dict(environ) | {
        "HANDOFF_MODEL": options.model,
        "HANDOFF_SECRET": secret,
        "HANDOFF_LOG_FORMAT": "json",
        "PYTHONUNBUFFERED": "1",
    }
    shares = split_cores(host.cores, len(options.workers))
    urls: dict[Role, list[str]] = {"prefill": [], "decode": []}
    children = []
    for index, (role, name) in enumerate(options.workers):
        own = {"HANDOFF_NAME": name, "HANDOFF_HOST": LOOPBACK, "HANDOFF_PORT": str(host.ports[index])}
        own |= _compute(options, host, environ, shares[index], index)
        urls[role].append(base_url(LOOPBACK, host.ports[index]))
        children.append(_child(role, name, common | own, urls[role][-1]))
    router = {
        "HANDOFF_HOST": options.host,
        "HANDOFF_PORT": str(options.port),
        "HANDOFF_PREFILL_URLS": ",".join(urls["prefill"]),
        "HANDOFF_DECODE_URLS": ",".join(urls["decode"]),
        "HANDOFF_RECOVERY_WAIT_S": environ.get("HANDOFF_RECOVERY_WAIT_S", str(RECOVERY_WAIT_S)),
    }
    return [*children, _child("router", "router", common | router, base_url(options.host, options.port))]


def with_checkpoint(
    specs: Sequence[ChildSpec], checkpoint: Path, weights_bytes: int, host: Host
) -> list[ChildSpec]:
    """The children with the folder that they serve, and workers that share a GPU with a share of its memory.

    Left alone, the first of them would take most of it before the other starts.
    """
    devices = Counter(spec.environ.get("HANDOFF_DEVICE") for spec in specs if spec.role != "router")
    placed = []
    for spec in specs:
        chosen = {"HANDOFF_MODEL": str(checkpoint)}
        device = spec.environ.get("HANDOFF_DEVICE", "")
        gpu = int(device.removeprefix("cuda:")) if re.fullmatch(r"cuda:\d+", device) else len(host.gpus)
        if spec.role != "router" and gpu < len(host.gpus) and devices[device] > 1:
            share = (host.gpus[gpu] // devices[device] - weights_bytes) * 4 // 5
            if share > 0:
                chosen["HANDOFF_KV_POOL_BYTES"] = spec.environ.get("HANDOFF_KV_POOL_BYTES", str(share))
        placed.append(replace(spec, environ={**spec.environ, **chosen}))
    return placed


def split_cores(cores: Sequence[int], num_workers: int) -> list[tuple[int, ...]]:
    """Disjoint runs of cores, sizes differing by at most one, bigger ones first; shared only if too few."""
    if len(cores) < num_workers:
        return [(cores[index % len(cores)],) for index in range(num_workers)]
    size, rest = divmod(len(cores), num_workers)
    starts = [index * size + min(index, rest) for index in range(num_workers + 1)]
    return [tuple(cores[start:end]) for start, end in pairwise(starts)]


def format_cores(cores: Sequence[int]) -> str:
    """Core numbers as HANDOFF_CPUS writes them: (0, 1, 2, 5) is "0-2,5"."""
    runs: list[list[int]] = []
    for core in sorted(cores):
        if runs and core == runs[-1][-1] + 1:
            runs[-1].append(core)
        else:
            runs.append([core])
    return ",".join(f"{run[0]}-{run[-1]}" if len(run) > 1 else str(run[0]) for run in runs)


def base_url(host: str, port: int) -> str:
    """Where a client on this machine reaches a server that listens on `host`."""
    reachable = {"0.0.0.0": LOOPBACK, "::": "::1", "": LOOPBACK}.get(host, host)
    return f"http://[{reachable}]:{port}" if ":" in reachable else f"http://{reachable}:{port}"


def _compute(
    options: Options, host: Host, environ: Mapping[str, str], cores: tuple[int, ...], index: int
) -> dict[str, str]:
    chosen = {"HANDOFF_CPUS": format_cores(cores), "HANDOFF_NUM_THREADS": str(len(cores))}
    if host.gpus:
        chosen["HANDOFF_DEVICE"] = f"cuda:{index % len(host.gpus)}"
        if environ.get("HANDOFF_DEVICE") in _ANY_GPU:
            environ = {name: value for name, value in environ.items() if name != "HANDOFF_DEVICE"}
    chosen = {name: environ.get(name, value) for name, value in chosen.items()}
    if options.threads_per_worker is not None:
        chosen["HANDOFF_NUM_THREADS"] = str(options.threads_per_worker)
    return chosen


def _child(role: Role, name: str, environ: Mapping[str, str], url: str) -> ChildSpec:
    argv = (sys.executable, "-m", "services.cli.main", role, "--stop-with-stdin")
    return ChildSpec(role=role, name=name, argv=argv, environ=environ, ready_url=f"{url}/ready")

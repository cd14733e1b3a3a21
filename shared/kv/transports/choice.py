"""Which transports a process uses: what its setting names, in that order, as far as it works here."""

from __future__ import annotations

from collections.abc import Callable

import structlog

from shared.kv.transports import shm, tcp, unix
from shared.kv.transports.base import Transport, TransportUnavailable
from shared.kv.transports.shm import SegmentBudget, ShmTransport
from shared.kv.transports.tcp import TcpTransport
from shared.kv.transports.unix import UnixTransport

log = structlog.get_logger()

DEFAULT = "shm,unix,tcp"
# For the settings of both sides: a list of distinct names.
PATTERN = r"^(shm|unix|tcp)(,(shm|unix|tcp)){0,2}$"
DEFAULT_SHM_BYTES = 64 * 1024 * 1024


def usable(names: str, shm_bytes: int = DEFAULT_SHM_BYTES) -> list[Transport]:
    """The named transports that pass their self-test; says in the log which do not, and why."""
    make: dict[str, Callable[[], Transport]] = {
        shm.NAME: lambda: ShmTransport(SegmentBudget(shm_bytes)),
        unix.NAME: UnixTransport,
        tcp.NAME: TcpTransport,
    }
    passed = []
    for name in dict.fromkeys(names.split(",")):
        transport = make[name]()
        try:
            transport.self_test()
        except TransportUnavailable as exc:
            log.warning("kv_transport_unavailable", transport=name, reason=str(exc))
        else:
            passed.append(transport)
    return passed

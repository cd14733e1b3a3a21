"""Which transports a process uses: what its setting names, in that order, as far as it works here."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated

import structlog
from pydantic import AfterValidator, Field

from shared.kv.pool_memory import PoolMemory
from shared.kv.transports import nixl_wire, shm_wire, tcp, unix
from shared.kv.transports.base import Transport, TransportUnavailable
from shared.kv.transports.nixl import NixlTransport
from shared.kv.transports.nixl_agent import NixlAgent
from shared.kv.transports.nixl_peers import NixlPeers
from shared.kv.transports.shm import ShmTransport
from shared.kv.transports.shm_ring import RingTransport, SegmentBudget
from shared.kv.transports.tcp import TcpTransport
from shared.kv.transports.unix import UnixTransport

log = structlog.get_logger()

NAMES = (nixl_wire.NAME, shm_wire.NAME, unix.NAME, tcp.NAME)
DEFAULT = "shm,unix,tcp"
DEFAULT_SHM_BYTES = 64 * 1024 * 1024


def _distinct(names: str) -> str:
    listed = names.split(",")
    if len(set(listed)) < len(listed):
        raise ValueError("a transport is named twice")
    return names


_ONE = f"({'|'.join(NAMES)})"
# For the settings of both sides: distinct names, the most wanted first.
TransportNames = Annotated[
    str, Field(pattern=rf"^{_ONE}(,{_ONE}){{0,{len(NAMES) - 1}}}$"), AfterValidator(_distinct)
]


def usable(
    names: str, shm_bytes: int = DEFAULT_SHM_BYTES, pool: PoolMemory | None = None, *, secret: bytes
) -> list[Transport]:
    """The named transports that pass their self-test; says in the log which do not, and why.

    pool: what is sent from, if it lies in host memory. shm_bytes: bounds what is mapped if peers cannot map that.
    secret: shared with receivers.
    """
    make: dict[str, Callable[[], Transport]] = {
        nixl_wire.NAME: lambda: NixlTransport(pool, secret),
        shm_wire.NAME: lambda: shm_transport(pool, shm_bytes),
        unix.NAME: UnixTransport,
        tcp.NAME: TcpTransport,
    }
    passed = []
    for name in dict.fromkeys(names.split(",")):
        transport = make[name]()
        with _told(name):
            transport.self_test()
            passed.append(transport)
    return passed


def shm_transport(pool: PoolMemory | None, shm_bytes: int) -> Transport:
    """From the pool itself if a peer can map it, else through a ring."""
    if pool is not None and pool.shared is not None:
        return ShmTransport(pool)
    return RingTransport(SegmentBudget(shm_bytes))


@dataclass(frozen=True, slots=True)
class Offered:
    """What a receiving process can take: arguments of shared.kv.receiver.KvListener."""

    transports: tuple[str, ...]
    nixl: NixlPeers | None


def offered(names: str) -> Offered:
    """The named transports that pass their self-test, for the receiving side."""
    wanted = dict.fromkeys(names.split(","))
    peers = None
    if nixl_wire.NAME in wanted:
        del wanted[nixl_wire.NAME]
        with _told(nixl_wire.NAME):
            agent = NixlAgent()
            agent.check()
            peers = NixlPeers(agent)
    others = usable(",".join(wanted), secret=b"") if wanted else []
    return Offered(tuple(transport.name for transport in others), peers)


@contextmanager
def _told(name: str) -> Iterator[None]:
    """A transport that does not work here is no failure, but the log says so."""
    try:
        yield
    except TransportUnavailable as exc:
        log.warning("kv_transport_unavailable", transport=name, reason=str(exc))

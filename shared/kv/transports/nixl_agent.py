"""The NIXL library as this project uses it: one agent for a process, reads from a peer's memory, small notices.

The only file that knows the library. It is an optional extra and takes a second to load, so it is imported when the
first agent is made. The library's own progress thread stays off: it never sleeps, and takes a whole core, idle or
not. So the library works only within the calls below, and whoever waits calls them.
"""

from __future__ import annotations

import importlib
import os
import secrets
import time
from contextlib import suppress
from typing import Any

import numpy as np

from shared.kv.transports.base import TransportUnavailable

# What the library says on stderr about a peer that has died is our error to report. Read when it is loaded.
_QUIET = {"NIXL_LOG_LEVEL": "FATAL", "UCX_LOG_LEVEL": "fatal"}
_MODULE = "nixl_cu12"
_BACKEND = "UCX"
_HOST_MEMORY = "DRAM"

_CHECK_S = 5.0
_PAUSE_S = 0.001

Ranges = np.ndarray[Any, np.dtype[np.uint64]]


class ReadFailed(Exception):
    """The library cannot read from this peer, or not any more; or it does not work at all any more."""


class NixlAgent:
    """Thread-safe. Raises TransportUnavailable where the library is missing or does not work.

    as_it_comes: with the library's own settings, its progress thread among them; only to measure that.
    """

    def __init__(self, *, as_it_comes: bool = False) -> None:
        for name, value in _QUIET.items():
            os.environ.setdefault(name, value)
        try:
            library: Any = importlib.import_module(_MODULE)
            own = {
                "enable_prog_thread": False,
                "sync_mode": library.nixl_thread_sync_t.NIXL_THREAD_SYNC_STRICT,
            }
            config = library.nixl_agent_config(backends=[_BACKEND], **({} if as_it_comes else own))
            self._agent: Any = library.nixl_agent(f"{os.getpid()}-{secrets.token_hex(8)}", config)
        except ImportError as exc:
            raise TransportUnavailable(f"the extra handoff[nixl] is not installed: {exc}") from exc
        except Exception as exc:
            raise TransportUnavailable(f"NIXL does not start here: {exc}") from exc
        if _BACKEND not in self._agent.backends:
            raise TransportUnavailable("NIXL has no UCX here")

    def register(self, *regions: tuple[int, int]) -> Registration:
        """Let peers read from, and own reads go to, these (address, length). Raises TransportUnavailable."""
        try:
            listed = self._agent.register_memory(
                [(address, length, 0, "") for address, length in regions], _HOST_MEMORY
            )
        except Exception as exc:
            raise TransportUnavailable(f"NIXL cannot register memory: {exc}") from exc
        return Registration(self._agent, listed)

    def check(self) -> None:
        """Read something from this process itself. Raises TransportUnavailable."""
        content = np.frombuffer(secrets.token_bytes(4096), dtype=np.uint8)
        copy = np.zeros_like(content)
        ranges = [(int(memory.ctypes.data), memory.nbytes) for memory in (content, copy)]
        registered = self.register(*ranges)
        try:
            own = self._agent.name
            source, target = (np.array([(*at, 0)], dtype=np.uint64) for at in ranges)
            read = self.read(own, target, source)
            due = time.monotonic() + _CHECK_S
            while not read.done():
                if time.monotonic() > due:
                    raise TransportUnavailable("NIXL did not read in its time")
                time.sleep(_PAUSE_S)
        except ReadFailed as exc:
            raise TransportUnavailable(f"NIXL cannot read: {exc}") from exc
        registered.close()
        if not np.array_equal(content, copy):
            raise TransportUnavailable("what NIXL read is not what was there")

    def metadata(self) -> bytes:
        """What a peer needs to read from the memory that is registered now. Raises TransportUnavailable."""
        try:
            return bytes(self._agent.get_agent_metadata())
        except Exception as exc:
            raise TransportUnavailable(f"NIXL does not describe this process: {exc}") from exc

    def meet(self, metadata: bytes) -> str:
        """Make a peer known, or known anew; returns its name. Raises ReadFailed."""
        try:
            name = self._agent.add_remote_agent(metadata)
            return name.decode() if isinstance(name, bytes) else str(name)
        except Exception as exc:
            raise ReadFailed(f"the peer cannot be reached: {exc}") from exc

    def forget(self, peer: str) -> None:
        """Drop a peer; no read from it may be under way. An unknown one is no error."""
        try:
            self._agent.remove_remote_agent(peer)
        except Exception:  # noqa: BLE001 - the library raises what it likes for a peer that is gone
            return

    def read(self, peer: str, local: Ranges, remote: Ranges) -> Read:
        """Begin to copy from the peer's ranges to ours.

        local, remote: (N, 3) of address, length, 0; equal lengths, row by row. Raises ReadFailed.
        """
        agent = self._agent
        try:
            handle = agent.initialize_xfer(
                "READ",
                agent.get_xfer_descs(local, _HOST_MEMORY),
                agent.get_xfer_descs(remote, _HOST_MEMORY),
                peer,
            )
            return Read(agent, handle, agent.transfer(handle))
        except Exception as exc:
            raise ReadFailed(f"the peer's memory cannot be read: {exc}") from exc

    def prepare(self, peer: str, local: Ranges, remote: Ranges) -> Prepared:
        """What `read` is given, for reads of parts of it: looked up once. Raises ReadFailed."""
        return Prepared(self._agent, peer, local, remote)

    def tell(self, peer: str, notice: bytes) -> None:
        """Send a notice; does not wait for the peer. Raises ReadFailed."""
        try:
            self._agent.send_notif(peer, notice)
        except Exception as exc:
            raise ReadFailed(f"the peer cannot be told: {exc}") from exc

    def notices(self) -> list[bytes]:
        """What peers have said since the last call. The library serves peers that read from us in here.

        Raises ReadFailed.
        """
        try:
            return [notice for said in self._agent.get_new_notifs().values() for notice in said]
        except Exception as exc:
            raise ReadFailed(f"peers cannot be heard: {exc}") from exc


class Registration:
    """Registered memory. It must stay where it is until `close`."""

    def __init__(self, agent: Any, listed: Any) -> None:
        self._agent = agent
        self._listed = listed

    def close(self) -> None:
        """Take it back; nobody may be reading. Raises TransportUnavailable."""
        try:
            self._agent.deregister_memory(self._listed)
        except Exception as exc:
            raise TransportUnavailable(f"NIXL does not give memory back: {exc}") from exc


class Prepared:
    """Ranges here and at a peer that the library has looked up. Raises ReadFailed."""

    def __init__(self, agent: Any, peer: str, local: Ranges, remote: Ranges) -> None:
        self._agent = agent
        self._numbers = np.arange(max(len(local), len(remote)), dtype=np.int32)
        try:
            self._sides = (
                agent.prep_xfer_dlist("NIXL_INIT_AGENT", local, _HOST_MEMORY),
                agent.prep_xfer_dlist(peer, remote, _HOST_MEMORY),
            )
        except Exception as exc:
            raise ReadFailed(f"the peer's memory cannot be read: {exc}") from exc

    def read(self, local_first: int, remote_first: int, num_ranges: int) -> Read:
        """Begin to copy so many of the peer's ranges to as many of ours, of equal lengths. Raises ReadFailed."""
        agent, (local, remote) = self._agent, self._sides
        own = self._numbers[local_first : local_first + num_ranges]
        theirs = self._numbers[remote_first : remote_first + num_ranges]
        try:
            handle = agent.make_prepped_xfer("READ", local, own, remote, theirs)
            return Read(agent, handle, agent.transfer(handle), made_of=self)
        except Exception as exc:
            raise ReadFailed(f"the peer's memory cannot be read: {exc}") from exc

    def close(self) -> None:
        """Give back what the library made of them, now and not when it is collected. No read is under way."""
        for side in self._sides:
            # It tries once more then.
            with suppress(Exception):
                side.release()


class Read:
    """A read that has begun. It cannot be called off: what it writes to is its own until it has ended."""

    def __init__(self, agent: Any, handle: Any, state: str, made_of: Prepared | None = None) -> None:
        self._made_of = made_of  # kept until this is gone
        self._agent = agent
        self._handle = handle
        self._state = state

    def done(self) -> bool:
        """Whether the bytes are there; drives the library on. Raises ReadFailed: then it has ended too."""
        if self._handle is None:
            return True
        try:
            if self._state == "PROC":
                self._state = self._agent.check_xfer_state(self._handle)
            if self._state == "PROC":
                return False
            handle, self._handle = self._handle, None
            handle.release()
        except Exception as exc:
            # The library's own handle tries once more to be released when it is collected.
            self._handle = None
            raise ReadFailed(f"reading from the peer failed: {exc}") from exc
        if self._state != "DONE":
            raise ReadFailed("reading from the peer failed")
        return True

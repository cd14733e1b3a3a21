"""Settings of a prefill worker."""

from __future__ import annotations

from pathlib import Path

from pydantic import Field

from shared.kv.transports.choice import DEFAULT, DEFAULT_SHM_BYTES, TransportNames
from shared.kv.transports.shm_wire import NAME as SHM
from shared.worker.settings import WorkerSettings


class PrefillSettings(WorkerSettings):
    """Frozen. See WorkerSettings for what both roles have."""

    kv_connect_timeout_s: float = Field(2.0, gt=0, le=60, description="Seconds to connect to a KV listener.")
    kv_io_timeout_s: float = Field(
        30.0, gt=0, le=600, description="Seconds without progress after which sending KV is given up."
    )
    kv_transports: TransportNames = Field(
        DEFAULT,
        description="How KV may travel, the most wanted first, of shm, unix (one host), nixl (an extra), tcp.",
    )
    kv_shm_bytes: int = Field(
        DEFAULT_SHM_BYTES,
        ge=0,
        description="Most shared memory for sending KV from a pool that peers cannot map (on a GPU); beyond it, "
        "the next transport is taken.",
    )
    kv_layer_groups: int = Field(
        4,
        ge=0,
        le=256,
        description="Parts of the last chunk's layers that are sent while later layers compute; 0: no such parts.",
    )
    kv_layers_from_tokens: int = Field(
        1, ge=1, le=1 << 20, description="Shortest last chunk, in tokens, that is sent in such parts."
    )
    max_sends: int = Field(32, ge=1, le=1024, description="Hand-offs sent at a time; each has a thread.")
    kv_save_dir: Path | None = Field(
        None,
        description="Folder in which hand-offs are kept for `handoff kv save` (KV and prompts); empty: none are.",
    )
    kv_save_files: int = Field(
        16, ge=1, le=100_000, description="Most hand-offs kept there; the oldest go first."
    )
    kv_save_bytes: int = Field(1 << 30, ge=1 << 16, description="Most bytes kept there; the oldest go first.")

    @property
    def shm_budget_bytes(self) -> int | None:
        """Most shared memory for sending KV from a pool that peers cannot map; None if that is not wanted."""
        return self.kv_shm_bytes if self.shares_pool else None

    @property
    def shares_pool(self) -> bool:
        """Decode copies from the pool itself over this one transport."""
        return SHM in self.kv_transports.split(",")

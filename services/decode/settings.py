"""Settings of a decode worker."""

from __future__ import annotations

from pydantic import Field

from shared.kv.transports.choice import DEFAULT, TransportNames
from shared.worker.settings import WorkerSettings


class DecodeSettings(WorkerSettings):
    """Frozen. See WorkerSettings for what both roles have."""

    kv_host: str | None = Field(
        None, description="Host in the KV address that prefill workers get; empty: as the router reached us."
    )
    kv_port: int = Field(0, ge=0, le=65535, description="Port of the KV listener; 0 takes any free one.")
    kv_io_timeout_s: float = Field(
        30.0, gt=0, le=600, description="Seconds without progress after which receiving KV is given up."
    )
    kv_transports: TransportNames = Field(
        DEFAULT,
        description="How KV may come: shm, unix (same host), nixl (an extra), tcp (always offered).",
    )
    max_receives: int | None = Field(
        None,
        ge=1,
        le=4096,
        description="Hand-offs received at a time; each has a thread. Empty: as many as HANDOFF_MAX_NUM_SEQS.",
    )
    reservation_timeout_s: float = Field(
        300.0,
        gt=0,
        le=3600,
        description="Seconds that blocks stay reserved for KV that does not come, or does not go on.",
    )

"""Settings of a prefill worker."""

from __future__ import annotations

from pydantic import Field

from shared.worker.settings import WorkerSettings


class PrefillSettings(WorkerSettings):
    """Frozen. See WorkerSettings for what both roles have."""

    kv_connect_timeout_s: float = Field(2.0, gt=0, le=60, description="Seconds to connect to a KV listener.")
    kv_io_timeout_s: float = Field(
        30.0, gt=0, le=600, description="Seconds without progress after which sending KV is given up."
    )
    max_sends: int = Field(32, ge=1, le=1024, description="Hand-offs sent at a time; each has a thread.")

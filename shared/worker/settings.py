"""Settings that prefill and decode workers share. Each worker's own are beside its app."""

from __future__ import annotations

from typing import Literal

from pydantic import Field, field_validator

from shared.settings import CommonSettings


class WorkerSettings(CommonSettings):
    """Frozen. Sizes in bytes or tokens, durations in seconds."""

    name: str | None = Field(
        None,
        pattern=r"^[A-Za-z0-9._-]{1,64}$",
        description="Name in headers, logs and metrics; empty: role and process id.",
    )
    dtype: Literal["auto", "float32", "bfloat16", "float16"] = Field(
        "auto", description="Serving dtype of weights and KV; auto is bfloat16 on CUDA and float32 on a CPU."
    )
    device: str = Field(
        "auto",
        pattern=r"^(auto|cpu|cuda(:\d+)?)$",
        description="auto takes CUDA if there is any, else the CPU.",
    )
    num_threads: int | None = Field(
        None, ge=1, le=1024, description="Compute threads on a CPU; empty: one for each core in cpus."
    )
    cpus: str | None = Field(
        None,
        pattern=r"^\d{1,5}(-\d{1,5})?(,\d{1,5}(-\d{1,5})?)*$",
        description="Cores that the process keeps to, such as 0-3,8; empty: all. Two workers must not share any.",
    )
    kv_pool_bytes: int | None = Field(
        None,
        ge=1 << 16,
        description="Memory of the KV pool; empty: 80 % of what is free on CUDA, on a CPU an eighth (up to 4 GiB).",
    )
    kv_wire: Literal["none", "int8", "fp8"] = Field(
        "none",
        description="Quantise KV on the way between hosts: prefill sends it so where decode is set to the same.",
    )
    kv_wire_max_error: float = Field(
        0.25,
        gt=0,
        le=100,
        allow_inf_nan=False,
        description="Largest change of a logit by kv_wire, measured at the start: above it no start.",
    )
    block_size: int = Field(16, ge=1, le=1024, description="Positions in a block of the pool.")
    chunk_size: int = Field(
        256, ge=0, le=1 << 20, description="Prompt tokens computed in one step; 0 is the whole prompt."
    )
    max_num_seqs: int = Field(64, ge=1, le=4096, description="Choices admitted at a time.")
    max_queued: int = Field(128, ge=1, le=100_000, description="Requests that may wait; more get 429.")
    queue_timeout_s: float = Field(
        10.0, gt=0, le=3600, description="Seconds that a request may wait for room; then it gets 429."
    )
    max_model_len: int | None = Field(
        None, ge=2, description="Longest prompt plus answer in tokens; empty: what model and pool allow."
    )
    max_body_bytes: int = Field(
        8 << 20, ge=1024, le=1 << 30, description="Longest request body (token ids, not KV)."
    )
    body_timeout_s: float = Field(
        10.0, gt=0, le=600, description="Seconds a request body may take to arrive."
    )
    step_limit_s: float = Field(
        120.0, gt=0, le=3600, description="A step of the engine that takes longer makes the worker not ready."
    )

    @property
    def shm_budget_bytes(self) -> int | None:
        """Most shared memory for sending KV; None for a role that sends none."""
        return None

    @property
    def shares_pool(self) -> bool:
        """Whether other processes shall be able to map the KV pool, if it lies in host memory."""
        return False

    @field_validator("cpus")
    @classmethod
    def _cpus_name_cores(cls, cpus: str | None) -> str | None:
        if cpus is not None:
            parse_cpus(cpus)
        return cpus


def parse_cpus(text: str) -> frozenset[int]:
    """Core numbers of a list such as 0-3,8. Raises ValueError if a range runs backward."""
    cores: set[int] = set()
    for part in text.split(","):
        first, _, last = part.partition("-")
        named = range(int(first), int(last or first) + 1)
        if not named:
            raise ValueError(f"the range {part} names no core")
        cores.update(named)
    return frozenset(cores)

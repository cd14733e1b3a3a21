"""Bodies of the worker routes that measure instead of serve, for `handoff doctor`. Guarded like all others.

GET /v1/host           -> HostReport
POST /v1/decode/probe  DecodeRequest -> DecodeEvent: `reserved`, then nothing; KV is received, verified and dropped
POST /v1/prefill/probe ProbeSend -> PrefillEvent: `sent` for every run, then `done`; the KV is made up, and
                       travels as a request's with this hand-off would: the first of prefill's own transports that
                       is offered and works, quantised where that is agreed
"""

from __future__ import annotations

from pydantic import Field

from shared.wire import Count, Handoff, Role, Seconds, Wire, Work

MAX_RUNS = 64


class ProbeSend(Work):
    """Made-up KV for `token_ids`, sent `runs` times to one reservation of /v1/decode/probe."""

    handoff: Handoff
    runs: int = Field(default=5, ge=1, le=MAX_RUNS)


class HostReport(Wire):
    """What a worker's process has and costs, measured when asked.

    host_id: equal means one kernel and network namespace. chunk_size 0: whole prompts. shm_bytes: None for a worker
    that needs no such budget. both_bytes_per_s: copied and digested in one pass; None if that takes two here.
    monotonic_s, wall_s: its clocks, to be compared; nothing else may depend on them.
    """

    role: Role
    host_id: str | None
    cpus: list[int]
    chunk_size: Count
    max_num_seqs: Count
    open_files: Count
    max_open_files: Count
    available_memory_bytes: Count
    shm_bytes: Count | None = None
    copy_bytes_per_s: float
    digest_bytes_per_s: float
    both_bytes_per_s: float | None = None
    measured_s: Seconds
    monotonic_s: float
    wall_s: float

"""What a running worker's hand-off of a prompt claims to be."""

from __future__ import annotations

from shared.kv.manifest import Expected, token_hash
from shared.wire import Handoff
from tests.support.cluster import RunningWorker


def expected_by(running: RunningWorker, prompt: list[int], handoff: Handoff | None = None) -> Expected:
    """handoff: whose identity, and what is held already; without one it is anybody's and nothing is."""
    return Expected(
        fingerprint=running.worker.fingerprint.digest,
        handoff_id="any" if handoff is None else handoff.handoff_id,
        epoch=1 if handoff is None else handoff.epoch,
        token_hash=token_hash(prompt),
        from_token=0 if handoff is None else handoff.have_tokens,
        num_tokens=len(prompt),
        num_choices=1,
        shape=running.worker.kv_shape,
    )

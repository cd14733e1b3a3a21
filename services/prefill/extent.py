"""Which part of a prompt's KV a hand-off is about, how it is cut, and the manifest that says so."""

from __future__ import annotations

from shared.kv.manifest import Chunk, Manifest, plan_chunks, token_hash
from shared.wire import Handoff, Work
from shared.worker.assemble import Worker


def sent_from(work: Work, handoff: Handoff) -> int:
    """Where the KV that travels begins."""
    return min(handoff.have_tokens, len(work.token_ids))


def chunks_from(worker: Worker, work: Work, from_token: int) -> tuple[Chunk, ...]:
    """What follows a token, cut as it is computed."""
    return plan_chunks(from_token, len(work.token_ids), worker.limits.chunk_size, worker.kv_shape)


def manifest_from(worker: Worker, work: Work, handoff: Handoff, from_token: int) -> Manifest:
    """Of the KV [from_token, end of the prompt)."""
    return Manifest(
        fingerprint=worker.fingerprint.digest,
        handoff_id=handoff.handoff_id,
        epoch=handoff.epoch,
        token_hash=token_hash(work.token_ids),
        from_token=from_token,
        num_tokens=len(work.token_ids),
        num_choices=work.num_choices,
        shape=worker.kv_shape,
        chunks=chunks_from(worker, work, from_token),
    )

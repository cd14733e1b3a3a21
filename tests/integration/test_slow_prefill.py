"""A prompt that takes longer to compute than a reservation waits for KV."""

from __future__ import annotations

import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import httpx

from shared.kv.manifest import Expected, Manifest, plan_chunks
from shared.kv.outgoing import Send, SendTimeouts
from shared.kv.progress import Progress
from shared.kv.sender import KvSender
from shared.kv.transports.tcp import TcpTransport
from shared.wire import DecodeEvent, DecodeRequest, Sampling
from tests.support.cluster import AUTH, SECRET, run_worker
from tests.support.completions import random_prompt
from tests.support.handoffs import expected_by
from tests.support.kv_peers import zeros

PROMPT = random_prompt(80, seed=1)
CHUNK = 16
WAIT_S = 2.0


def test_kv_that_comes_chunk_by_chunk_is_waited_for(tiny_model: Path) -> None:
    """The reservation's time is for KV that does not come. It ended in the middle of the transfer, with 410."""
    work = DecodeRequest(
        request_id="slow",
        token_ids=PROMPT,
        num_prompt_tokens=len(PROMPT),
        sampling=Sampling(temperature=0, max_tokens=3, ignore_eos=True),
        timeout_s=60,
    )
    with (
        run_worker("decode", tiny_model, reservation_timeout_s=WAIT_S) as running,
        httpx.stream(
            "POST", f"{running.url}/v1/decode", content=work.to_json(), headers=AUTH, timeout=30
        ) as answer,
        closing(KvSender(SECRET.encode(), [TcpTransport()], SendTimeouts())) as sender,
        ThreadPoolExecutor() as threads,
    ):
        lines = answer.iter_lines()
        handoff = DecodeEvent.model_validate_json(next(lines)).reserved
        assert handoff is not None
        want = expected_by(running, PROMPT, handoff)
        manifest = Manifest(
            **{name: getattr(want, name) for name in Expected.__dataclass_fields__},
            chunks=plan_chunks(0, len(PROMPT), CHUNK, want.shape),
        )
        source, _ = zeros(want)
        progress = Progress()
        sending = threads.submit(sender.send, Send(handoff, "slow", manifest, source, progress))
        for end in range(CHUNK, len(PROMPT) + 1, CHUNK):
            time.sleep(WAIT_S / 3)  # so long a chunk takes to compute
            progress.advance(end)
        progress.finish([1], [False])
        assert "tcp" == sending.result(10).transport
        events = [DecodeEvent.model_validate_json(line) for line in lines]
    assert events[-1].finish is not None

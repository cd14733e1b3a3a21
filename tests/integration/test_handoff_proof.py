"""KV really moved, and prefill really happened on prefill."""

from __future__ import annotations

import pytest

from tests.support.cluster import Cluster, wait_until
from tests.support.completions import GREEDY, complete, random_prompt


@pytest.mark.parametrize("length", [1, 100, 1000])
def test_decode_computes_no_prompt_token_and_receives_the_formulas_bytes(pd: Cluster, length: int) -> None:
    """Per request: 2 L K D tokens itemsize bytes arrive, and not one prompt token is computed on decode."""
    decode, shape = pd.decode[0], pd.decode[0].worker.kv_shape
    received = decode.metric("handoff_kv_received_bytes_total")
    computed = decode.metric("handoff_prompt_tokens_computed")
    on_prefill = pd.prefill[0].metric("handoff_prompt_tokens_computed")

    response = complete(pd, random_prompt(length, seed=1000 + length), max_tokens=4, **GREEDY)

    formula = 2 * shape.num_layers * shape.num_kv_heads * shape.head_dim * length * 4
    # Counted when the engine may already go on, so perhaps after the answer.
    wait_until(lambda: decode.metric("handoff_kv_received_bytes_total") - received >= formula)
    wait_until(lambda: pd.prefill[0].metric("handoff_prompt_tokens_computed") - on_prefill >= length)
    assert formula == decode.metric("handoff_kv_received_bytes_total") - received
    assert formula == int(response.headers["x-handoff-kv-bytes"])
    assert computed == decode.metric("handoff_prompt_tokens_computed")
    assert length == pd.prefill[0].metric("handoff_prompt_tokens_computed") - on_prefill
    assert response.headers["x-handoff-prompt-tokens-computed-on-decode"] == "0"
    assert response.headers["x-handoff-topology"] == "pd"


def test_one_token_needs_no_decode_worker(pd: Cluster) -> None:
    """max_tokens 1 makes no reservation and moves no KV."""
    before = pd.decode[0].metric("handoff_decode_requests_total")

    response = complete(pd, random_prompt(40, seed=4), max_tokens=1, **GREEDY)

    assert response.json()["usage"]["completion_tokens"] == 1
    assert before == pd.decode[0].metric("handoff_decode_requests_total")


def test_unified_mode_computes_the_prompt_on_decode(unified: Cluster) -> None:
    """The baseline says what it is."""
    response = complete(unified, random_prompt(40, seed=4), max_tokens=4, **GREEDY)

    assert response.headers["x-handoff-topology"] == "unified"
    assert response.headers["x-handoff-prompt-tokens-computed-on-decode"] == "40"

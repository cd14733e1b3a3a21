"""How long answers are, why they end, and what is counted."""

from __future__ import annotations

from typing import Any

import pytest

from router.text.tokenizer import TextTokenizer
from tests.support import http
from tests.support.answers import GREEDY, Way
from tests.support.cluster import Cluster
from tests.support.completions import random_prompt

CONTEXT = 4096


def work(cluster: Cluster) -> list[float]:
    """Requests that each worker was sent so far."""
    roles = ["prefill"] * len(cluster.prefill) + ["decode"] * len(cluster.decode)
    return [
        running.metric(f"handoff_{role}_requests_total")
        for role, running in zip(roles, cluster.workers, strict=True)
    ]


def test_both_names_of_the_length_limit_hold(pd: Cluster, way: Way) -> None:
    """Old and new name, alone and together: the smaller one wins."""
    for old, new in ((None, 5), (5, None), (9, 5), (5, 9)):
        answer = way.ask(pd, ignore_eos=True, max_tokens=old, max_completion_tokens=new)

        assert (5, "length") == (answer.counts[1], answer.only.finish_reason), (old, new)


@pytest.mark.parametrize("name", ["max_tokens", "max_completion_tokens"])
def test_a_limit_that_is_none_is_refused_by_name(pd: Cluster, way: Way, name: str) -> None:
    """It is never taken for something else."""
    for value in (-1, "10", 1.5, True, [5], 2**70):
        response = way.post(pd, **{name: value})

        assert (400, name) == (response.status_code, response.json()["error"]["param"]), value


def test_an_answer_has_exactly_as_many_tokens_as_asked(cluster: Cluster, way: Way) -> None:
    """Prefill's own token is counted once."""
    for length in (1, 2, 3, 15, 16, 17):
        answer = way.ask(cluster, max_tokens=length, ignore_eos=True, return_token_ids=True, **GREEDY)

        found = (answer.counts[1], len(answer.only.token_ids), answer.only.finish_reason)
        assert (length, length, "length") == found


def test_an_end_token_at_the_limit_is_still_an_end(cluster: Cluster, way: Way, end_id: int) -> None:
    """With k tokens to the natural end: cut before, "stop" at k and after. The end token is counted everywhere."""
    candidates = [
        {**GREEDY, "return_token_ids": True, "logit_bias": {end_id: b}} for b in (11, 10, 9, 8.5, 8)
    ]
    answers = ((fields, way.ask(cluster, "x", max_tokens=40, **fields)) for fields in candidates)
    fields, natural = next((f, a) for f, a in answers if 2 < a.counts[1] < 40)
    k = natural.counts[1]
    assert (end_id, "stop") == (natural.only.token_ids[-1], natural.only.finish_reason)

    for limit, expected in ((k - 1, "length"), (k, "stop"), (k + 1, "stop")):
        answer = way.ask(cluster, "x", max_tokens=limit, **fields)
        assert (expected, min(limit, k)) == (answer.only.finish_reason, answer.counts[1])
        assert natural.only.token_ids[:limit] == answer.only.token_ids
        assert natural.only.text.startswith(answer.only.text)


def test_choices_without_a_limit_share_the_memory_that_there_is(
    cluster: Cluster, way: Way, end_id: int
) -> None:
    """Each was to have the rest of the context, which is more than the pool: a 400."""
    size = cluster.decode[0].worker.pool
    assert 2 * CONTEXT < size.num_blocks * size.block_size < 3 * (CONTEXT - 50)

    answer = way.ask(cluster, n=3, logit_bias={end_id: 100.0})

    assert ["stop"] * 3 == [choice.finish_reason for choice in answer.choices]


@pytest.mark.parametrize("stream", [False, True])
def test_every_prompt_of_a_batch_has_its_own_ending(cluster: Cluster, stream: bool, end_id: int) -> None:
    """One that ends early neither cuts the others short nor is cut by what they count."""
    way = Way("completions", stream=stream)
    fields: dict[str, Any] = {**GREEDY, "logit_bias": {end_id: 8.0}, "max_tokens": 8}
    prompts = ["x", "1 2 3 4", "red", "A B C D E", "def f():", "Momo"]
    alone = [way.ask(cluster, prompt, **fields) for prompt in prompts]
    assert {"stop", "length"} == {answer.only.finish_reason for answer in alone}

    together = way.ask(cluster, prompts, **fields)

    assert [answer.only for answer in alone] == together.choices
    assert sum(answer.counts[1] for answer in alone) == together.counts[1]


@pytest.mark.parametrize(
    ("num_prompt", "max_tokens"), [(CONTEXT + 1, None), (CONTEXT, None), (CONTEXT, 1), (CONTEXT - 5, 100)]
)
def test_what_does_not_fit_is_refused_in_words_that_clients_search_for(
    cluster: Cluster, way: Way, num_prompt: int, max_tokens: int | None
) -> None:
    """400 before any byte of a stream, with true counts, and no worker hears of it."""
    said = {"messages": [{"role": "user", "content": "a"}]}
    template = http.post(f"{cluster.url}/tokenize", json=said).json()["count"] - 1
    overhead = template if way.endpoint == "chat" else 0
    before = work(cluster)

    response = way.post(cluster, "a" + " a" * (num_prompt - overhead - 1), max_tokens=max_tokens)

    error = response.json()["error"]
    assert (400, "application/json") == (response.status_code, response.headers["content-type"])
    assert "context_length_exceeded" == error["code"]
    assert f"maximum context length is {CONTEXT} tokens" in error["message"]
    assert f"{num_prompt} " in error["message"]
    assert before == work(cluster)


def test_the_last_place_of_the_context_can_be_used(cluster: Cluster) -> None:
    """Prompt and answer fill it to the last token."""
    way, prompt = Way("completions", stream=False), random_prompt(CONTEXT - 3, seed=6)

    answer = way.ask(cluster, prompt, max_tokens=3, ignore_eos=True, **GREEDY)

    assert (CONTEXT - 3, 3) == answer.counts


def test_tokens_are_counted_not_pieces_of_text(cluster: Cluster, way: Way, tokenizer: TextTokenizer) -> None:
    """Twelve tokens that are parts of characters: few pieces, but 12 and "length"."""
    parts = [i for i in range(256) if tokenizer.token_bytes(i)[0] >= 0x80]

    answer = way.ask(
        cluster, max_tokens=12, seed=3, logit_bias=dict.fromkeys(parts, 100.0), return_token_ids=True
    )

    assert set(answer.only.token_ids) <= set(parts)
    assert (12, "length") == (answer.counts[1], answer.only.finish_reason)


def test_cached_tokens_are_what_prefill_found(cluster: Cluster, way: Way) -> None:
    """0 for a prompt that was never seen, its whole blocks the second time, counted once; never decode's view."""
    text = f"{way} {cluster.url} is a prompt that only this test asks. " * 4
    cold = way.ask(cluster, text, max_tokens=3, ignore_eos=True)
    warm = way.ask(cluster, text, max_tokens=3, ignore_eos=True)

    assert cold.usage is not None
    assert warm.usage is not None
    template = 16 if way.endpoint == "chat" else 0  # its first block
    assert cold.usage["prompt_tokens_details"]["cached_tokens"] in (0, template)
    found = warm.usage["prompt_tokens_details"]["cached_tokens"]
    assert warm.counts[0] - 16 <= found < warm.counts[0]
    assert (cold.counts[0], 3) == warm.counts
    assert warm.counts[0] + 3 == warm.usage["total_tokens"]

"""The truth test: prefill, hand-off and decode give what one process of plain transformers gives."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.cluster import Cluster
from tests.support.completions import GREEDY, complete, random_prompt, token_ids
from tests.support.oracle import Oracle

LENGTHS = (1, 2, 15, 16, 17, 31, 32, 33, 63, 64, 65, 127, 128, 129, 255, 256, 257, 1023, 1024, 1025)


@pytest.mark.parametrize("length", LENGTHS)
def test_greedy_over_pd_equals_plain_generate(pd: Cluster, oracle: Oracle, length: int) -> None:
    """Cold and with a full prefix cache, at and around every block boundary."""
    prompt = random_prompt(length, seed=length)
    expected = oracle(prompt, 8)

    for cached in (0, (length - 1) // 16 * 16):
        response = complete(pd, prompt, max_tokens=8, **GREEDY)
        assert expected == token_ids(response)[0]
        assert cached == response.json()["usage"]["prompt_tokens_details"]["cached_tokens"]


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 15, 16, 17, 64])
def test_every_answer_has_exactly_max_tokens(pd: Cluster, oracle: Oracle, max_tokens: int) -> None:
    """Neither prefill's token is lost nor counted twice."""
    prompt = random_prompt(20, seed=5)

    response = complete(pd, prompt, max_tokens=max_tokens, **GREEDY)

    assert oracle(prompt, max_tokens) == token_ids(response)[0]
    assert max_tokens == response.json()["usage"]["completion_tokens"]
    assert response.json()["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize("n", [1, 4])
def test_seeded_sampling_is_equal_in_pd_and_unified_mode_alone_and_in_a_batch(
    pd: Cluster, unified: Cluster, n: int
) -> None:
    """A token is a function of the request and its logits alone."""
    fields: dict[str, Any] = {"temperature": 1.2, "n": n, "max_tokens": 24, "ignore_eos": True}
    prompts = [random_prompt(10 + 7 * i, seed=100 + i) for i in range(6)]

    def ask(cluster: Cluster, index: int) -> list[list[int]]:
        return token_ids(complete(cluster, prompts[index], seed=index, **fields))

    alone = [ask(pd, index) for index in range(len(prompts))]
    with ThreadPoolExecutor(len(prompts)) as threads:
        together = list(threads.map(lambda index: ask(pd, index), range(len(prompts))))
        in_unified = list(threads.map(lambda index: ask(unified, index), range(len(prompts))))

    assert alone == together
    assert alone == in_unified
    assert all(len({tuple(ids) for ids in answer}) == n for answer in alone)


def test_first_choice_of_many_equals_the_only_choice_of_one(pd: Cluster) -> None:
    """Choice i draws the same tokens whatever n is."""
    prompt = random_prompt(30, seed=9)
    fields: dict[str, Any] = {"temperature": 1.0, "seed": 3, "max_tokens": 12, "ignore_eos": True}

    many = token_ids(complete(pd, prompt, n=4, **fields))
    one = token_ids(complete(pd, prompt, n=1, **fields))

    assert one[0] == many[0]


def test_two_turns_send_only_what_decode_lacks(pd: Cluster) -> None:
    """Decode's own tokens count as held: the second turn's hand-off carries the new part only."""
    prompt = random_prompt(64, seed=77)
    first = complete(pd, prompt, max_tokens=33, **GREEDY)
    second_prompt = prompt + token_ids(first)[0] + random_prompt(16, seed=78)

    second = complete(pd, second_prompt, max_tokens=4, **GREEDY)

    held = (64 + 32) // 16 * 16
    per_token = pd.decode[0].worker.kv_shape.bytes_per_token
    assert (len(second_prompt) - held) * per_token == int(second.headers["x-handoff-kv-bytes"])

"""What seeds, temperatures and penalties do to an answer, and that they do it to no other one."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.answers import GREEDY, Way
from tests.support.cluster import Cluster
from tests.support.oracle import Oracle

COMPLETIONS = Way("completions", stream=False)
THE = "the the the the"
GREEDY_IN_DISGUISE: list[dict[str, Any]] = [
    *({"temperature": t} for t in (1e-2, 1e-3, 1e-4, 1e-5, 1e-6, 1e-9, 1e-45, 5e-324, 0)),
    {"temperature": 1, "top_p": 1e-4},
    {"temperature": 1, "top_p": 0},
    {"temperature": 1, "top_k": 1},
    {"temperature": 1, "min_p": 1},
    {"temperature": 0, "top_p": 0.1, "top_k": 5, "seed": 3},
    {"temperature": 0, "min_p": 0.3, "seed": 4},
]
OUT_OF_BOUNDS: list[dict[str, Any]] = [
    {"temperature": 2.1},
    {"temperature": -0.1},
    {"temperature": "0"},
    {"temperature": True},
    {"top_p": 1.1},
    {"top_p": -1},
    {"top_k": -2},
    {"top_k": 1.5},
    {"min_p": 2},
    {"repetition_penalty": 0},
    {"presence_penalty": 3},
    {"frequency_penalty": -2.5},
    {"seed": 1.5},
    {"seed": "7"},
    {"seed": 2**64},
    {"logit_bias": {"x": 1}},
    {"logit_bias": {"5": 101}},
    {"logit_bias": {"-1": 1}},
    {"logit_bias": [5]},
    {"n": 0},
    {"n": 10_000},
    {"n": 1.5},
]


def test_what_leaves_one_token_is_greedy(cluster: Cluster) -> None:
    """Tiny temperatures have no band in which they break; filters that leave one token, and temperature 0."""
    expected = COMPLETIONS.ask(cluster, "San Jose is a", max_tokens=5, **GREEDY).only

    for fields in GREEDY_IN_DISGUISE:
        found = COMPLETIONS.ask(cluster, "San Jose is a", max_tokens=5, repetition_penalty=1.0, **fields).only

        assert expected == found, fields


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_values_that_mean_nothing_are_refused_by_name(pd: Cluster, endpoint: str) -> None:
    """Before a stream begins."""
    for fields in OUT_OF_BOUNDS:
        response = Way(endpoint, stream=True).post(pd, **fields)

        assert 400 == response.status_code, fields
        assert response.json()["error"]["param"].startswith(*fields)


def test_a_seed_repeats_all_choices_and_the_first_is_the_only_one(cluster: Cluster, way: Way) -> None:
    """Choices differ from each other; the same seed gives the same again, whatever n is."""
    fields: dict[str, Any] = {"temperature": 1.2, "seed": 7, "max_tokens": 8}
    answers = [way.ask(cluster, "A name for a cat:", n=4, **fields) for _ in range(2)]
    alone = way.ask(cluster, "A name for a cat:", **fields)

    assert answers[0].choices == answers[1].choices
    assert len(set(answers[0].texts)) > 1
    assert answers[0].choices[0] == alone.only


def test_without_a_seed_answers_vary(cluster: Cluster, way: Way) -> None:
    """Sampling is on by default, as the checkpoint wants it, and temperature has an effect."""
    fields = {"temperature": 1.5, "top_p": 1, "top_k": -1, "max_tokens": 8}

    assert len({way.ask(cluster, "Hello", **fields).only.text for _ in range(4)}) > 2


def test_first_tokens_of_several_choices_are_drawn_one_by_one(cluster: Cluster) -> None:
    """Also where prefill draws all of them: at a high temperature the first tokens differ."""
    hot = {"temperature": 2, "top_p": 1, "top_k": -1, "repetition_penalty": 1.0, "seed": 1}

    answer = COMPLETIONS.ask(cluster, "x", n=16, max_tokens=3, return_token_ids=True, **hot)

    assert len({choice.token_ids[0] for choice in answer.choices}) > 4


def test_presence_and_frequency_count_the_answer_only(cluster: Cluster) -> None:
    """The first token's logprobs are those without; repetition counts the prompt as well."""

    def first(**penalty: float) -> Any:
        answer = COMPLETIONS.ask(cluster, THE, max_tokens=1, logprobs=5, **(GREEDY | penalty))
        assert isinstance(answer.only.logprobs, dict)
        return answer.only.logprobs["top_logprobs"]

    plain = first()

    assert plain == first(presence_penalty=2) == first(frequency_penalty=2)
    assert plain != first(repetition_penalty=1.3)


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
def test_penalties_count_prefills_token_too(cluster: Cluster, name: str) -> None:
    """The second token, which decode draws, is penalised for the first, which prefill drew."""
    first = COMPLETIONS.ask(cluster, THE, max_tokens=1, return_token_ids=True, **GREEDY).only.token_ids[0]
    asked: dict[str, Any] = {**GREEDY, "max_tokens": 2, "logprobs": 0, "ignore_eos": True}

    def second(**penalty: float) -> float:
        forced = COMPLETIONS.ask(cluster, THE, logit_bias={first: 100}, **asked, **penalty)
        assert isinstance(forced.only.logprobs, dict)
        return float(forced.only.logprobs["token_logprobs"][1])

    assert second() == pytest.approx(0.0, abs=1e-3)
    assert second(**{name: 2.0}) <= second()


def test_a_neighbour_in_the_batch_is_not_touched(cluster: Cluster) -> None:
    """Of requests that run together only those with penalties change."""
    asked: dict[str, Any] = {"max_tokens": 24, "ignore_eos": True, "return_token_ids": True}
    penalties = {"presence_penalty": 2, "frequency_penalty": 2, "repetition_penalty": 1.5}
    plain, changed = (
        COMPLETIONS.ask(cluster, THE, **asked, **(GREEDY | more)).only.token_ids for more in ({}, penalties)
    )
    assert plain != changed

    with ThreadPoolExecutor(8) as threads:
        together = list(
            threads.map(
                lambda i: COMPLETIONS.ask(cluster, THE, **asked, **(GREEDY | (penalties if i % 2 else {}))),
                range(8),
            )
        )

    assert [plain, changed] * 4 == [answer.only.token_ids for answer in together]


def test_the_checkpoints_defaults_can_be_turned_off(cluster: Cluster, oracle: Oracle) -> None:
    """What a request leaves out is what generation_config says, on both workers; neutral values are plain."""
    prompt = [5, 9, 200, 31, 7, 7, 7, 7, 90]
    asked: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True, "logprobs": 3}
    defaults = {"temperature": 0.7, "top_p": 0.8, "top_k": 20, "repetition_penalty": 1.1}
    neutral = {"temperature": 0, "repetition_penalty": 1.0, "top_k": -1, "top_p": 1}

    left_out = COMPLETIONS.ask(cluster, prompt, seed=5, **asked).only
    named = COMPLETIONS.ask(cluster, prompt, seed=5, **asked, **defaults).only
    off = COMPLETIONS.ask(cluster, prompt, **asked, **neutral).only

    assert named == left_out
    assert oracle(prompt, 12) == off.token_ids
    assert isinstance(off.logprobs, dict)
    assert isinstance(named.logprobs, dict)
    assert off.logprobs["top_logprobs"][0] != named.logprobs["top_logprobs"][0]

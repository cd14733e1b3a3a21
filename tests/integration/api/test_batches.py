"""Several prompts and several choices in one request: order, counts, and whose answer is whose."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from tests.support.answers import GREEDY, Way
from tests.support.cluster import Cluster
from tests.support.completions import random_prompt

PROMPTS = ["1 2 3 4", "A B C D E F G H I J", "red"]
WHOLE = Way("completions", stream=False)


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("drawn", [GREEDY, {"temperature": 1.2, "seed": 3}], ids=["greedy", "seeded"])
def test_choices_of_a_batch_stand_in_the_prompts_order(
    cluster: Cluster, stream: bool, drawn: dict[str, Any]
) -> None:
    """Choice j of prompt i has index i * n + j and is what the prompt gets alone; prompts are counted once each."""
    way = Way("completions", stream=stream)
    fields: dict[str, Any] = {"n": 2, "max_tokens": 6, "stop": ["\n"], **drawn}
    alone = [way.ask(cluster, prompt, **fields) for prompt in PROMPTS]

    together = way.ask(cluster, PROMPTS, **fields)

    assert [text for answer in alone for text in answer.texts] == together.texts
    assert sum(answer.counts[0] for answer in alone) == together.counts[0]
    assert sum(answer.counts[1] for answer in alone) == together.counts[1]


def test_a_long_prompt_does_not_move_a_short_one(cluster: Cluster) -> None:
    """The first prompt ends last; ids and texts can be batched alike."""
    prompts = [random_prompt(600, seed=1), random_prompt(3, seed=2), random_prompt(40, seed=3)]
    fields: dict[str, Any] = {"max_tokens": 5, "ignore_eos": True, "return_token_ids": True, **GREEDY}
    expected = [WHOLE.ask(cluster, prompt, **fields).only.token_ids for prompt in prompts]

    for stream in (False, True):
        together = Way("completions", stream=stream).ask(cluster, prompts, **fields)
        assert expected == [choice.token_ids for choice in together.choices]


@pytest.mark.parametrize(
    "fields",
    [
        {"n": 2, "best_of": 1},
        {"n": 1, "best_of": 3, "stream": True},
        {"best_of": 0},
        {"best_of": -1},
        {"best_of": "2"},
        {"best_of": 10_000},
    ],
    ids=str,
)
def test_a_best_of_that_cannot_be_is_refused(pd: Cluster, fields: dict[str, Any]) -> None:
    """Smaller than n, or streamed, or no number."""
    response = WHOLE.post(pd, **fields)

    assert (400, "best_of") == (response.status_code, response.json()["error"]["param"])


def test_best_of_counts_every_candidate_and_shows_n(cluster: Cluster) -> None:
    """What old clients send, null and as many as n, asks for nothing."""
    fields: dict[str, Any] = {"max_tokens": 5, "ignore_eos": True, "seed": 2, "temperature": 1}

    best = WHOLE.ask(cluster, "Hi", n=1, best_of=3, **fields)

    assert (1, 15) == (len(best.choices), best.counts[1])
    for stream in (False, True):
        way = Way("completions", stream=stream)
        plain = way.ask(cluster, "Hi", n=2, **fields).choices
        assert plain == way.ask(cluster, "Hi", n=2, best_of=2, **fields).choices
        assert plain == way.ask(cluster, "Hi", n=2, best_of=None, **fields).choices


def test_ids_of_many_answers_all_differ(pd: Cluster) -> None:
    """Of 200 requests at once, on both endpoints, streamed and not; all events of one have its id."""
    ways = [Way(endpoint, stream=stream) for endpoint in ("chat", "completions") for stream in (False, True)]

    with ThreadPoolExecutor(16) as threads:
        answers = list(threads.map(lambda i: ways[i % 4].ask(pd, max_tokens=1), range(200)))

    assert 200 == len({answer.id.partition("-")[2] for answer in answers})


@pytest.mark.parametrize("n", [2, 5, 16])
def test_many_choices_of_many_requests_at_once(pd: Cluster, way: Way, n: int) -> None:
    """Each request gets its own choices, each of them as if it were alone."""
    fields: dict[str, Any] = {"n": n, "max_tokens": 4, "temperature": 1.5, "top_p": 1, "top_k": -1}
    expected = way.ask(pd, "Momo the cat", seed=1, **fields).texts

    with ThreadPoolExecutor(4) as threads:
        answers = list(threads.map(lambda _: way.ask(pd, "Momo the cat", seed=1, **fields).texts, range(4)))

    assert [expected] * 4 == answers
    assert len(set(expected)) > 1

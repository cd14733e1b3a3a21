"""Lists of more prompts than the workers have room for: all are answered, however long the last one has to wait."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support import http
from tests.support.cluster import Cluster, run_cluster
from tests.support.completions import GREEDY, complete, random_prompt, token_ids

PROMPTS = [random_prompt(10, seed=i) for i in range(6)]
FIELDS: dict[str, Any] = {"max_tokens": 60, "return_token_ids": True, **GREEDY}


@pytest.fixture(scope="module", params=["pd", "unified", "short queue"])
def narrow(request: pytest.FixtureRequest, tiny_model: Path) -> Iterator[Cluster]:
    """Two choices at a time run at decode, and who waits for longer than a moment is refused."""
    decode = {"max_num_seqs": 2, "queue_timeout_s": 0.02}
    if request.param == "short queue":
        decode["max_queued"] = 1
    with run_cluster(tiny_model, num_prefill=request.param != "unified", decode=decode) as cluster:
        yield cluster


def test_a_list_is_answered_though_most_of_it_was_refused_at_first(narrow: Cluster, pd: Cluster) -> None:
    """One refused prompt once failed all of them, with 429, though nobody else was served."""
    response = complete(narrow, PROMPTS, **FIELDS)

    assert token_ids(complete(pd, PROMPTS, **FIELDS)) == token_ids(response)
    assert int(response.headers["x-handoff-retries"]) > 0
    narrow.check_nothing_left()


def test_a_streamed_list_is_answered_too(narrow: Cluster, pd: Cluster) -> None:
    """It once broke off with an error after the tokens of those that had room."""
    body = {"model": "tiny", "prompt": PROMPTS, "stream": True} | FIELDS
    found: dict[int, list[int]] = {index: [] for index in range(len(PROMPTS))}

    with http.stream("POST", f"{narrow.url}/v1/completions", json=body) as response:
        events = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    for event in events[:-1]:
        for choice in json.loads(event)["choices"]:
            found[choice["index"]] += choice["token_ids"]

    assert "[DONE]" == events[-1]
    assert token_ids(complete(pd, PROMPTS, **FIELDS)) == list(found.values())
    narrow.check_nothing_left()

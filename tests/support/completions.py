"""Completions by token ids, for tests that compare ids."""

from __future__ import annotations

import random
from typing import Any

import httpx

from tests.support import http
from tests.support.cluster import Cluster

GREEDY: dict[str, Any] = {"temperature": 0, "repetition_penalty": 1.0, "ignore_eos": True}
NUM_PLAIN_IDS = 256


def random_prompt(length: int, seed: int) -> list[int]:
    """Ordinary token ids, another sequence for each seed."""
    rng = random.Random(seed)
    return [rng.randrange(NUM_PLAIN_IDS) for _ in range(length)]


def complete(cluster: Cluster, prompt: list[int] | list[list[int]], **fields: Any) -> httpx.Response:
    """A whole completion that also names its token ids."""
    body = {"model": "tiny", "prompt": prompt, "return_token_ids": True} | fields
    response = http.post(f"{cluster.url}/v1/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return response


def token_ids(response: httpx.Response) -> list[list[int]]:
    """Ids of every choice, by index."""
    choices = sorted(response.json()["choices"], key=lambda c: c["index"])
    return [choice["token_ids"] for choice in choices]

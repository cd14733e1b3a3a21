"""Every stop string there can be in one answer: the answer ends right before it, streamed or whole."""

from __future__ import annotations

import json
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest

from tests.support.cluster import Cluster

BODY: dict[str, Any] = {
    "model": "tiny",
    "prompt": "Once upon a time there was",
    "max_tokens": 12,
    "temperature": 0,
    "repetition_penalty": 1.0,
}
LENGTHS = range(2, 7)


def whole(client: httpx.Client, **fields: Any) -> tuple[str, str]:
    """Text and finish reason."""
    response = client.post("/v1/completions", json=BODY | fields)
    assert response.status_code == 200, response.text
    (choice,) = response.json()["choices"]
    return choice["text"], choice["finish_reason"]


def streamed(client: httpx.Client, **fields: Any) -> tuple[str, str]:
    """Joined text and the finish reason of a stream."""
    text, reasons = "", []
    with client.stream("POST", "/v1/completions", json=BODY | fields | {"stream": True}) as response:
        for line in response.iter_lines():
            if line.startswith("data: {"):
                (choice,) = json.loads(line.removeprefix("data: "))["choices"]
                text += choice["text"]
                reasons += [choice["finish_reason"]] if choice["finish_reason"] else []
    (reason,) = reasons
    return text, reason


@pytest.mark.parametrize("topology", ["pd", "unified"])
def test_every_substring_as_stop_cuts_like_split(topology: str, request: pytest.FixtureRequest) -> None:
    """For one fixed greedy answer, all its substrings of two to six characters."""
    cluster: Cluster = request.getfixturevalue(topology)
    limits = httpx.Limits(max_connections=8)
    with (
        httpx.Client(base_url=cluster.url, timeout=60, limits=limits) as client,
        ThreadPoolExecutor(8) as threads,
    ):
        text, _ = whole(client)
        stops = sorted({text[i : i + size] for size in LENGTHS for i in range(len(text) - size + 1)})
        assert len(stops) > 60
        expected = [(text.split(stop)[0], "stop") for stop in stops]

        if topology == "pd":
            assert expected == list(threads.map(lambda stop: whole(client, stop=stop), stops))
        assert expected == list(threads.map(lambda stop: streamed(client, stop=[stop]), stops))
    cluster.check_nothing_left()

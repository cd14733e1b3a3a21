"""The real model under schemas and with tools: what `handoff bench structured` does at length, a few times."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from services.cli.bench_structured import Server, measure_structured
from tests.support.cluster import Cluster

pytestmark = [pytest.mark.real, pytest.mark.timeout(900)]

WEATHER = {
    "type": "function",
    "function": {
        "name": "get_weather",
        "description": "Current weather of a city",
        "parameters": {
            "type": "object",
            "properties": {"city": {"type": "string"}},
            "required": ["city"],
            "additionalProperties": False,
        },
    },
}
ASKED: dict[str, Any] = {
    "messages": [{"role": "user", "content": "What is the weather in Rome and in Oslo?"}],
    "tools": [WEATHER],
    "temperature": 0,
    "max_tokens": 100,
}


def test_schemas_and_required_calls_hold_at_temperature_1(real_pd: Cluster) -> None:
    """A few of the bench's kinds: nothing is wrong, and most ends before the limit."""
    tally = measure_structured(
        Server(real_pd.url, None, None, max_tokens=120), runs=3, calls=1, concurrency=2, seed=1
    )

    assert [] == tally.wrong
    assert sum(count["right"] for count in tally.counts.values()) >= 2


@pytest.mark.parametrize("choice", ["auto", "required"])
def test_the_model_calls_a_tool_that_fits_the_question(real_pd: Cluster, choice: str) -> None:
    """Of its own will too, in whatever form it writes calls."""
    answer = httpx.post(
        f"{real_pd.url}/v1/chat/completions", json=ASKED | {"tool_choice": choice}, timeout=600
    ).json()["choices"][0]

    assert "tool_calls" == answer["finish_reason"]
    calls = [call["function"] for call in answer["message"]["tool_calls"]]
    assert {"get_weather"} == {call["name"] for call in calls}
    assert "Rome" in {json.loads(call["arguments"])["city"] for call in calls}


def test_json_mode_ends_by_itself(real_pd: Cluster) -> None:
    """A parseable object, without the word JSON in the prompt."""
    body = {
        "messages": [
            {"role": "user", "content": "A cat named Tom is 3 years old. What are its name and age?"}
        ],
        "response_format": {"type": "json_object"},
        "temperature": 0,
        "max_tokens": 300,
    }
    answer = httpx.post(f"{real_pd.url}/v1/chat/completions", json=body, timeout=600).json()["choices"][0]

    assert "stop" == answer["finish_reason"]
    assert isinstance(json.loads(answer["message"]["content"]), dict)

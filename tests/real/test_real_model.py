"""The truth test on the real model: prefill, hand-off and decode equal plain transformers, token for token."""

from __future__ import annotations

import json
import re

import pytest

from router.text.tokenizer import TextTokenizer
from tests.support import http
from tests.support.cluster import Cluster
from tests.support.completions import complete, token_ids
from tests.support.oracle import Oracle

pytestmark = [pytest.mark.real, pytest.mark.timeout(600)]

PROMPTS = [
    "The capital of France is",
    "def fibonacci(n):\n    ",
    "1, 2, 3, 4,",
    "Once upon a time",
    "Water boils at",
    "import numpy as np\n",
    "The quick brown fox jumps over the lazy dog. " * 4,
    "你好，世界",
    "SELECT name FROM users WHERE",
    "Q: What is 12 * 12?\nA:",
]
NUM_TOKENS = 10
STAGES = ["route", "reserve", "queue", "prefill", "transfer", "decode_queue", "decode", "relay"]


@pytest.mark.parametrize("text", PROMPTS, ids=lambda text: text[:20].strip())
def test_greedy_over_pd_equals_plain_generate(
    real_pd: Cluster, real_tokenizer: TextTokenizer, oracle: Oracle, text: str
) -> None:
    """Equal token ids for ten prompts, and KV really moved for each."""
    prompt = real_tokenizer.encode(text, allow_special=False)

    response = complete(real_pd, prompt, max_tokens=NUM_TOKENS, temperature=0, repetition_penalty=1.0)

    assert oracle(prompt, NUM_TOKENS) == token_ids(response)[0]
    assert response.headers["x-handoff-topology"] == "pd"
    assert response.headers["x-handoff-prompt-tokens-computed-on-decode"] == "0"


def test_the_capital_of_france_is_paris(real_pd: Cluster) -> None:
    """The README's question, with every stage in the headers, and stages that sum to the total."""
    body = {
        "messages": [{"role": "user", "content": "What is the capital of France?"}],
        "max_tokens": 12,
        "temperature": 0,
    }
    response = http.post(f"{real_pd.url}/v1/chat/completions", json=body, timeout=300)

    assert "Paris" in response.json()["choices"][0]["message"]["content"]
    times = {
        name: float(value)
        for name, value in re.findall(r"([a-z_]+);dur=([0-9.]+)", response.headers["server-timing"])
    }
    total = times["total"]
    assert total == pytest.approx(sum(times[stage] for stage in STAGES), abs=2 + 0.02 * total)


def test_a_chat_stream_is_the_whole_answer(real_pd: Cluster) -> None:
    """Streamed and joined text equals the text in one piece."""
    body = {
        "messages": [{"role": "user", "content": "Say hello in French, German and 日本語, with an emoji."}],
        "max_tokens": 24,
        "temperature": 0,
    }
    whole = http.post(f"{real_pd.url}/v1/chat/completions", json=body, timeout=300).json()
    with http.stream(
        "POST", f"{real_pd.url}/v1/chat/completions", json=body | {"stream": True}, timeout=300
    ) as response:
        events = [line[6:] for line in response.iter_lines() if line.startswith("data: {")]

    deltas = [json.loads(event)["choices"][0]["delta"] for event in events]
    text = "".join(delta.get("content", "") for delta in deltas)
    assert whole["choices"][0]["message"]["content"] == text
    assert "\ufffd" not in text

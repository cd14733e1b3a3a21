"""Logprobs of answers: shapes, lengths, and values against plain transformers, on both sides of the hand-off."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoModelForCausalLM

from router.text.tokenizer import TextTokenizer
from tests.support.answers import GREEDY, Answer, Way
from tests.support.cluster import Cluster

FUNCTION = {
    "name": "f",
    "parameters": {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    },
}
TOOLS = [{"type": "function", "function": FUNCTION}]


def asked(way: Way, num_top: int) -> dict[str, Any]:
    """The fields that ask for logprobs."""
    if way.endpoint == "completions":
        return {"logprobs": num_top}
    return {"logprobs": True, "top_logprobs": num_top}


def values(answer: Answer) -> list[float]:
    """Of each token, in either shape."""
    found = answer.only.logprobs
    if isinstance(found, dict):
        return found["token_logprobs"]
    return [entry["logprob"] for entry in found or ()]


def check_completion(text: str, lists: dict[str, list[Any]], num_top: int, offset: int = 0) -> None:
    """Four lists of one length that join to the text; the chosen token is among the best or beside them."""
    assert {"tokens", "token_logprobs", "top_logprobs", "text_offset"} == set(lists)
    assert 1 == len({len(found) for found in lists.values()})
    assert text == "".join(lists["tokens"])
    for token, at, logprob, best in zip(
        lists["tokens"], lists["text_offset"], lists["token_logprobs"], lists["top_logprobs"], strict=True
    ):
        assert offset == at
        assert num_top <= len(best) <= num_top + 1
        assert logprob in best.values()
        offset += len(token)


def check_chat(text: str, entries: list[dict[str, Any]], num_top: int) -> None:
    """Exact bytes: joined they are the content, less a character that the end left unfinished."""
    joined = b"".join(bytes(entry["bytes"]) for entry in entries)
    assert joined.decode("utf-8", "replace").rstrip("�") == text.rstrip("�")
    for entry in entries:
        assert num_top == len(entry["top_logprobs"])
        assert sorted((top["logprob"] for top in entry["top_logprobs"]), reverse=True) == [
            top["logprob"] for top in entry["top_logprobs"]
        ]
        assert all(isinstance(top["bytes"], list) for top in entry["top_logprobs"])


@pytest.mark.parametrize("num_top", [0, 2, 20])
def test_streamed_logprobs_are_the_whole_ones_in_the_endpoints_own_shape(
    cluster: Cluster, num_top: int
) -> None:
    """One entry per token, the first one included, whichever worker made it."""
    for endpoint in ("completions", "chat"):
        whole, stream = Way(endpoint, stream=False), Way(endpoint, stream=True)
        fields = {"max_tokens": 12, "seed": 2, "ignore_eos": True, **asked(whole, num_top)}
        answer, joined = (way.ask(cluster, "Rome is the capital of", **fields) for way in (whole, stream))

        assert 12 == len(values(answer)) == answer.counts[1]
        assert values(answer) == pytest.approx(values(joined), abs=1e-3)
        if isinstance(answer.only.logprobs, dict):
            assert isinstance(joined.only.logprobs, dict)
            assert answer.only.logprobs["tokens"] == joined.only.logprobs["tokens"]
            check_completion(answer.only.text, answer.only.logprobs, num_top)
            check_completion(joined.only.text, joined.only.logprobs, num_top)
        else:
            assert isinstance(joined.only.logprobs, list)
            check_chat(answer.only.text, answer.only.logprobs or [], num_top)
            check_chat(joined.only.text, joined.only.logprobs, num_top)


def test_values_are_those_of_plain_transformers(
    cluster: Cluster, way: Way, tiny_model: Path, tokenizer: TextTokenizer
) -> None:
    """Prefill's token and decode's tokens alike, after the hand-off."""
    fields = {"max_tokens": 5, "ignore_eos": True, "return_token_ids": True, **GREEDY, **asked(way, 1)}
    answer = way.ask(cluster, "Rome is the capital of", **fields)
    said = Way(way.endpoint, stream=False).post(cluster, "Rome is the capital of", **fields).json()
    prompt = said["choices"][0]["prompt_token_ids"]
    ids = prompt + answer.only.token_ids
    plain = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    with torch.inference_mode():
        rows = torch.log_softmax(plain(torch.tensor([ids])).logits[0].float(), dim=-1)[len(prompt) - 1 : -1]

    expected = [float(row[token]) for row, token in zip(rows, answer.only.token_ids, strict=True)]
    assert expected == pytest.approx(values(answer), abs=1e-3)


@pytest.mark.parametrize("value", [21, 100, -1, True, "1", 1.5], ids=repr)
def test_a_count_beyond_the_limit_is_refused_with_the_limit(pd: Cluster, value: Any) -> None:
    """20 on both endpoints; the text says so."""
    refused = [
        Way("completions", stream=False).post(pd, logprobs=value),
        Way("chat", stream=True).post(pd, logprobs=True, top_logprobs=value),
    ]

    for response, name in zip(refused, ("logprobs", "top_logprobs"), strict=True):
        error = response.json()["error"]
        assert (400, name) == (response.status_code, error["param"])
        assert value not in (21, 100) or "20" in error["message"]


def test_top_logprobs_without_logprobs_is_refused(pd: Cluster) -> None:
    """Absent and false; zero of none asks for nothing."""
    chat = Way("chat", stream=False)
    for fields in ({"top_logprobs": 3}, {"top_logprobs": 3, "logprobs": False}):
        response = chat.post(pd, **fields)
        assert (400, "top_logprobs") == (response.status_code, response.json()["error"]["param"])
    assert chat.ask(pd, top_logprobs=0, max_tokens=1).only.logprobs is None


@pytest.mark.parametrize("stream", [False, True])
def test_tokens_of_calls_keep_their_logprobs(cluster: Cluster, stream: bool) -> None:
    """As many entries as counted tokens, less the end token, though most of them are no content."""
    answer = Way("chat", stream=stream).ask(
        cluster,
        tools=TOOLS,
        tool_choice="required",
        parallel_tool_calls=False,
        seed=2,
        logprobs=True,
        max_tokens=200,
    )

    assert [("f", answer.only.calls[0][1])] == answer.only.calls
    assert "tool_calls" == answer.only.finish_reason
    assert answer.counts[1] - 1 == len(answer.only.logprobs or ())

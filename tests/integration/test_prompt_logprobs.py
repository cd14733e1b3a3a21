"""echo and logprobs of prompts: what evaluation harnesses measure models by."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from transformers import AutoModelForCausalLM, PreTrainedModel

from router.text.tokenizer import TextTokenizer
from tests.support.cluster import Cluster, run_cluster
from tests.support.completions import random_prompt

GREEDY: dict[str, Any] = {"temperature": 0, "repetition_penalty": 1.0}
TEXT = "\n1. Ann has 20\n2. Bob has 7 🚀 \ud842\udfb7"
TEXT = TEXT.encode("utf-16", "surrogatepass").decode("utf-16")


@pytest.fixture(scope="module")
def plain(tiny_model: Path) -> PreTrainedModel:
    """The same checkpoint in plain transformers."""
    model: PreTrainedModel = AutoModelForCausalLM.from_pretrained(tiny_model, dtype=torch.float32)
    return model


@pytest.fixture(scope="module")
def tokenizer(tiny_model: Path) -> TextTokenizer:
    """The checkpoint's tokenizer."""
    return TextTokenizer.load(tiny_model)


@pytest.fixture(scope="module", params=["pd", "unified"])
def cluster(request: pytest.FixtureRequest) -> Cluster:
    """Both topologies."""
    found: Cluster = request.getfixturevalue(request.param)
    return found


def ask(cluster: Cluster, **fields: Any) -> dict[str, Any]:
    """A whole completion."""
    response = httpx.post(f"{cluster.url}/v1/completions", json={"model": "tiny"} | fields, timeout=60)
    assert response.status_code == 200, response.text
    answer: dict[str, Any] = response.json()
    return answer


def streamed(cluster: Cluster, **fields: Any) -> list[dict[str, Any]]:
    """The choice objects of a stream, in order."""
    body = {"model": "tiny", "stream": True} | fields
    with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60) as response:
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line.startswith("data: ")]
    assert "[DONE]" == lines.pop()
    return [choice for line in lines for choice in json.loads(line)["choices"]]


def check_lists(answer: dict[str, Any], num_tokens: int, index: int = 0) -> dict[str, list[Any]]:
    """Four lists of one length that join to the text."""
    choice = answer["choices"][index]
    lists: dict[str, list[Any]] = choice["logprobs"]
    assert {"tokens", "token_logprobs", "top_logprobs", "text_offset"} == set(lists)
    assert {num_tokens} == {len(values) for values in lists.values()}
    assert choice["text"] == "".join(lists["tokens"])
    offset = 0
    for token, at in zip(lists["tokens"], lists["text_offset"], strict=True):
        assert offset == at
        offset += len(token)
    return lists


@pytest.mark.parametrize("length", [1, 2, 16, 17, 256, 257, 700])
def test_scores_equal_the_log_softmax_of_plain_transformers(
    cluster: Cluster, plain: PreTrainedModel, length: int
) -> None:
    """Of every position, cached or not; the first has none; completion tokens are scored the same way."""
    prompt = random_prompt(length, seed=length)
    for max_tokens in (0, 1, 4):
        answer = ask(
            cluster,
            prompt=prompt,
            echo=True,
            logprobs=2,
            max_tokens=max_tokens,
            return_token_ids=True,
            **GREEDY,
        )
        ids = prompt + answer["choices"][0]["token_ids"]
        with torch.inference_mode():
            expected = torch.log_softmax(plain(torch.tensor([ids])).logits[0].float(), dim=-1)

        usage = answer["usage"]
        assert (length, max_tokens) == (usage["prompt_tokens"], usage["completion_tokens"])
        assert 0 == usage["prompt_tokens_details"]["cached_tokens"]
        lists = check_lists(answer, length + max_tokens)
        assert (None, None) == (lists["token_logprobs"][0], lists["top_logprobs"][0])
        for position in range(1, len(ids)):
            row = expected[position - 1]
            assert lists["token_logprobs"][position] == pytest.approx(float(row[ids[position]]), abs=1e-3)
            best = max(lists["top_logprobs"][position].values())
            assert best == pytest.approx(float(row.max()), abs=1e-3)
    cluster.check_nothing_left()


def test_scoring_alone_needs_no_decode(pd: Cluster) -> None:
    """max_tokens 0 with echo: the prompt's text, no tokens, "length", no hand-off; then all goes on."""
    before = pd.decode[0].metric("handoff_decode_requests_total")

    answer = ask(pd, prompt="Answer: Yes", max_tokens=0, echo=True, logprobs=1)
    silent = ask(pd, prompt="Answer: Yes", max_tokens=0)

    assert ("Answer: Yes", "length") == (answer["choices"][0]["text"], answer["choices"][0]["finish_reason"])
    assert ("", "length") == (silent["choices"][0]["text"], silent["choices"][0]["finish_reason"])
    assert 0 == answer["usage"]["completion_tokens"] == silent["usage"]["completion_tokens"]
    assert before == pd.decode[0].metric("handoff_decode_requests_total")
    assert ask(pd, prompt="Answer: Yes", max_tokens=3)["usage"]["completion_tokens"]


def test_echo_of_token_ids_is_their_text(cluster: Cluster, tokenizer: TextTokenizer) -> None:
    """Special tokens show as what they are; without logprobs there are no lists."""
    ids = tokenizer.encode("<|im_start|>user\nHi")
    plain = ask(cluster, prompt=ids, max_tokens=3, **GREEDY)

    echoed = ask(cluster, prompt=ids, max_tokens=3, echo=True, **GREEDY)

    assert "<|im_start|>user\nHi" + plain["choices"][0]["text"] == echoed["choices"][0]["text"]
    assert echoed["choices"][0]["logprobs"] is None


def test_lists_cover_prompt_and_completion_of_every_choice(
    cluster: Cluster, tokenizer: TextTokenizer
) -> None:
    """A batch with n: in order, each with its own prompt, as many entries as usage counts."""
    prompts = [TEXT, "The capital of France is", "red"]
    answer = ask(cluster, prompt=prompts, n=2, max_tokens=5, echo=True, logprobs=0, seed=5, ignore_eos=True)

    assert [0, 1, 2, 3, 4, 5] == [choice["index"] for choice in answer["choices"]]
    for index in range(6):
        prompt = prompts[index // 2]
        check_lists(answer, len(tokenizer.encode(prompt)) + 5, index)
        assert answer["choices"][index]["text"].startswith(prompt)
    assert sum(len(tokenizer.encode(p)) for p in prompts) == answer["usage"]["prompt_tokens"]
    assert 30 == answer["usage"]["completion_tokens"]


@pytest.mark.parametrize("fields", [{"stop": ["e"]}, {"end": True}, {"max_tokens": 1}, {}])
def test_as_many_entries_as_usage_counts_however_it_ends(
    cluster: Cluster, tokenizer: TextTokenizer, fields: dict[str, Any]
) -> None:
    """At a stop string, at an end token, at the limit."""
    if "end" in fields:
        fields = {"logit_bias": {tokenizer.control_ids["<|im_end|>"]: 15}}
    body: dict[str, Any] = {"prompt": TEXT, "max_tokens": 24, "echo": True, "logprobs": 1, **GREEDY} | fields
    answer = ask(cluster, **body)
    usage = answer["usage"]
    lists = check_lists(answer, usage["prompt_tokens"] + usage["completion_tokens"])
    assert all(isinstance(logprob, float) for logprob in lists["token_logprobs"][1:])

    pieces = streamed(cluster, **body)

    assert answer["choices"][0]["text"] == "".join(piece["text"] for piece in pieces)
    for name, values in lists.items():
        joined = [value for piece in pieces if piece["logprobs"] for value in piece["logprobs"][name]]
        assert values == (pytest.approx(joined) if name == "token_logprobs" else joined)
    assert answer["choices"][0]["finish_reason"] == pieces[-1]["finish_reason"]


def test_best_of_returns_the_best_by_mean_logprob(cluster: Cluster) -> None:
    """n of the candidates that the same seed draws with n alone; all of them are counted."""
    fields: dict[str, Any] = {"prompt": "Hi", "seed": 3, "temperature": 1.5, "max_tokens": 6, "logprobs": 0}
    drawn = ask(cluster, n=5, **fields)["choices"]
    means = {c["text"]: sum(c["logprobs"]["token_logprobs"]) / len(c["logprobs"]["tokens"]) for c in drawn}

    best = ask(cluster, n=2, best_of=5, **fields)

    assert sorted(means, key=lambda text: -means[text])[:2] == [choice["text"] for choice in best["choices"]]
    assert [0, 1] == [choice["index"] for choice in best["choices"]]
    assert best["usage"]["completion_tokens"] > 12


def test_a_prompt_that_fills_the_context_can_be_scored(tiny_model: Path) -> None:
    """Evaluation harnesses send windows of exactly the model's length."""
    with run_cluster(tiny_model, prefill={"chunk_size": 0}) as cluster:
        answer = ask(cluster, prompt=random_prompt(4096, seed=2), max_tokens=0, echo=True, logprobs=1)

    assert 4096 == len(answer["choices"][0]["logprobs"]["tokens"])

"""Streams against whole answers: the same text character by character, whatever else is asked for."""

from __future__ import annotations

import itertools
from typing import Any

import pytest

from router.text.tokenizer import TextTokenizer
from tests.support.answers import GREEDY, Choice, Way, events_of
from tests.support.cluster import Cluster

HARD = "Repeat: 😀👨‍👩‍👧‍👦🇨🇭 你好，世界 𠮷 नमस्ते ẞ"
FUNCTION = {
    "name": "f",
    "parameters": {
        "type": "object",
        "properties": {"a": {"enum": [1, 2]}},
        "required": ["a"],
        "additionalProperties": False,
    },
}
OPTIONS: dict[str, dict[str, Any]] = {
    "logprobs": {"logprobs": True, "top_logprobs": 2},
    "n": {"n": 2},
    "tools": {"tools": [{"type": "function", "function": FUNCTION}], "tool_choice": "required"},
    "usage": {"stream_options": {"include_usage": True}},
    "stop": {"stop": ["e", "1", "2"]},
    "ids": {"return_token_ids": True},
    "format": {"response_format": {"type": "json_object"}},
}
EXCLUDING = {("tools", "format")}


def both(cluster: Cluster, endpoint: str, text: Any, **fields: Any) -> list[list[Choice]]:
    """The choices of the whole answer and of the joined stream."""
    return [Way(endpoint, stream=stream).ask(cluster, text, **fields).choices for stream in (False, True)]


@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_joined_streams_are_the_whole_text(cluster: Cluster, endpoint: str) -> None:
    """Of a model that emits parts of characters, and bytes that are none, in any order."""
    for seed in range(3):
        hot = {"seed": seed, "temperature": 1.3, "top_p": 1, "top_k": -1, "max_tokens": 30}
        whole, joined = both(cluster, endpoint, HARD, n=2, **hot)

        assert whole == joined


@pytest.mark.parametrize("character", ["𠮷", "नम", "ẞ", "👨‍👩‍👧‍👦"])
def test_a_character_is_whole_wherever_the_hand_off_cuts_it(
    cluster: Cluster, tokenizer: TextTokenizer, character: str
) -> None:
    """Its last token may be prefill's first, decode's first, or come after a part of it in the prompt."""
    ids = tokenizer.encode(character)
    for split in range(len(ids)):
        for stream in (False, True):
            way = Way("completions", stream=stream)
            spelled = {**OPTIONS["ids"], "guided_choice": [character]} if split == 0 else {}
            bias = {"logit_bias": {ids[split]: 100.0}, "max_tokens": 1} if split else {"max_tokens": 40}
            answer = way.ask(cluster, [5, *ids[:split]], **GREEDY, **bias, **spelled)

            assert "�" not in answer.only.text
            if split == 0:
                assert character == answer.only.text
            elif split == len(ids) - 1:
                assert character.endswith(answer.only.text)
                assert answer.only.text


def test_white_space_stays(cluster: Cluster, way: Way, tokenizer: TextTokenizer) -> None:
    """At the beginning, in between and as the whole answer; prefill's token keeps its own."""
    for token in (" the", "\n", "\t", " "):
        bias = {"logit_bias": {tokenizer.encode(token)[0]: 100.0}}
        expected = tokenizer.decode(tokenizer.encode(token)[:1])

        answer = way.ask(cluster, "def f():\n ", max_tokens=3, **bias, **GREEDY)

        assert expected * 3 == answer.only.text


@pytest.mark.parametrize("prompt", ["def f():\n", "Hello", "ends with a space ", "\t\n"])
def test_text_is_what_its_tokens_spell(cluster: Cluster, tokenizer: TextTokenizer, prompt: str) -> None:
    """The difference between decoding with and without the answer, nothing stripped."""
    for stream in (False, True):
        fields: dict[str, Any] = {"max_tokens": 12, "ignore_eos": True, "return_token_ids": True, **GREEDY}
        answer = Way("completions", stream=stream).ask(cluster, prompt, **fields)
        before = tokenizer.encode(prompt)
        spelled = tokenizer.decode([*before, *answer.only.token_ids]).removeprefix(tokenizer.decode(before))

        assert spelled.rstrip("�") == answer.only.text.rstrip("�")


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("end", ["<|im_end|>", "<|endoftext|>"])
def test_an_answer_that_is_only_an_end_is_empty(
    cluster: Cluster, way: Way, tokenizer: TextTokenizer, end: str, n: int
) -> None:
    """Prefill's first token ends it: no text, "stop", one token each, and no KV went anywhere."""
    answer = way.ask(cluster, n=n, max_tokens=50, logit_bias={tokenizer.control_ids[end]: 100.0})

    assert [Choice("", "stop")] * n == answer.choices
    assert n == answer.counts[1]
    if cluster.prefill and not way.stream:
        assert ("0", "none") == (
            answer.headers["x-handoff-kv-bytes"],
            answer.headers.get("x-handoff-transport", "none"),
        )


def test_an_ignored_end_does_not_end(cluster: Cluster, way: Way, end_id: int) -> None:
    """With ignore_eos the answer goes on to its limit on both workers; end tokens have no text."""
    answer = way.ask(cluster, max_tokens=6, ignore_eos=True, logit_bias={end_id: 100.0})

    assert (Choice("", "length"), 6) == (answer.only, answer.counts[1])


@pytest.mark.parametrize(
    ("one", "other"), [pair for pair in itertools.combinations(OPTIONS, 2) if pair not in EXCLUDING]
)
def test_every_pair_of_options_goes_together(pd: Cluster, one: str, other: str) -> None:
    """Role, ending, usage, logprobs and calls are all there, and as in the whole answer."""
    fields = {"max_tokens": 40, "seed": 2, **OPTIONS[one], **OPTIONS[other]}
    whole_fields = {name: value for name, value in fields.items() if name != "stream_options"}
    whole = Way("chat", stream=False).ask(pd, **whole_fields)
    joined = Way("chat", stream=True).ask(pd, **({"stream_options": None} | fields))

    assert [(c.text, c.calls, c.finish_reason, c.token_ids) for c in whole.choices] == [
        (c.text, c.calls, c.finish_reason, c.token_ids) for c in joined.choices
    ]
    assert [len(c.logprobs or ()) for c in whole.choices] == [len(c.logprobs or ()) for c in joined.choices]
    if "logprobs" in (one, other):
        assert all(choice.logprobs for choice in joined.choices)
    if "usage" in (one, other):
        assert joined.counts == whole.counts


def test_a_stream_passes_proxies_as_it_is(cluster: Cluster) -> None:
    """Headers that keep nginx and browsers from collecting it; no length, nothing compressed."""
    for endpoint in ("chat", "completions"):
        response = Way(endpoint, stream=True).post(cluster, max_tokens=3)

        assert "no-cache" in response.headers["cache-control"]
        assert "no" == response.headers["x-accel-buffering"]
        assert "content-length" not in response.headers
        assert "content-encoding" not in response.headers
        assert events_of(response)

"""Stop strings and end tokens: where answers end, what is left of them, and what is held back meanwhile."""

from __future__ import annotations

from typing import Any

import pytest

from router.text.tokenizer import TextTokenizer
from tests.support import http
from tests.support.answers import GREEDY, WAYS, Way, events_of
from tests.support.cluster import Cluster

HAND_WRITTEN = (
    "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
    "<|im_start|>assistant\n"
)
SIXTY = "☃ this stop text has sixty characters and its first never comes"


def ask(cluster: Cluster, way: Way, **fields: Any) -> tuple[str, str | None, int]:
    """Text, reason and counted tokens of one and the same prompt, which completions get as text."""
    answer = way.ask(cluster, HAND_WRITTEN if way.endpoint == "completions" else "hi", **GREEDY, **fields)
    return answer.only.text, answer.only.finish_reason, answer.counts[1]


def test_a_stop_over_several_tokens_is_found_and_nothing_of_it_leaks(cluster: Cluster, way: Way) -> None:
    """Stops that begin in the first, end in the last, or span three tokens; of several the first one counts."""
    text, _, _ = ask(cluster, way, max_tokens=12)
    assert len(text) > 10
    middle = len(text) // 2
    stops: list[Any] = [
        text[:1],
        text[:5],
        text[-3:],
        text[middle - 3 : middle + 3],
        ["never there", text[middle : middle + 4]],
        [text[-2:], text[2:6], "\n\n\n"],
    ]
    for stop in stops:
        several = [stop] if isinstance(stop, str) else stop
        expected = text[: min(text.find(s) for s in several if s in text)]

        found, reason, _ = ask(cluster, way, max_tokens=12, stop=stop)

        assert (expected, "stop") == (found, reason), stop


def test_a_stop_met_by_prefills_token_needs_no_decode(pd: Cluster, way: Way) -> None:
    """The first character, or the first token: the hand-off is not even waited for, and one token is counted."""
    first, _, _ = ask(pd, way, max_tokens=1)
    assert first
    for stop in (first, first[:1]):
        assert ("", "stop", 1) == ask(pd, way, max_tokens=40, stop=stop)


def test_a_stop_over_prefills_and_decodes_token_is_found(cluster: Cluster, way: Way) -> None:
    """The last character of the one and the first of the other."""
    first, _, _ = ask(cluster, way, max_tokens=1)
    text, _, _ = ask(cluster, way, max_tokens=8)
    assert len(text) > len(first)
    stop = text[len(first) - 1 : len(first) + 1]

    assert (text.split(stop)[0], "stop") == ask(cluster, way, max_tokens=8, stop=stop)[:2]


def test_min_tokens_shields_the_beginning(cluster: Cluster, way: Way) -> None:
    """Neither a stop string nor an end token ends the answer before."""
    text, _, _ = ask(cluster, way, max_tokens=8)

    stopped, _, num_tokens = ask(cluster, way, max_tokens=8, stop=text[:1], min_tokens=3)

    assert num_tokens >= 3
    assert len(stopped) >= 2


@pytest.mark.parametrize("name", ["<|im_end|>", "<|endoftext|>"])
def test_a_special_token_is_an_end_without_text(
    cluster: Cluster, tokenizer: TextTokenizer, name: str
) -> None:
    """Named as a stop or not, written by hand or not, streamed or not: the same end, counted the same."""
    bias = {"logit_bias": {tokenizer.control_ids[name]: 10.0}, "max_tokens": 40}
    outcomes = [ask(cluster, way, **bias, **stop) for way in WAYS for stop in ({}, {"stop": [name]})]

    (outcome,) = set(outcomes)
    assert "stop" == outcome[1]
    assert "<|" not in outcome[0]
    free = ask(cluster, WAYS[0], max_tokens=40)[0]
    assert free.startswith(outcome[0][:1])


def test_a_special_token_that_ends_nothing_by_itself_can_be_a_stop(
    cluster: Cluster, way: Way, tokenizer: TextTokenizer
) -> None:
    """Its text is in no answer, so it has to be met as the token; without the stop the answer goes on."""
    bias = {"logit_bias": {tokenizer.control_ids["<|im_start|>"]: 100.0}, "max_tokens": 4}

    assert ("", "stop", 1) == ask(cluster, way, **bias, stop=["<|im_start|>"])
    assert ("", "length", 4) == ask(cluster, way, **bias)


@pytest.mark.parametrize("with_tools", [False, True])
@pytest.mark.parametrize("endpoint", ["chat", "completions"])
def test_a_long_stop_delays_nothing(cluster: Cluster, endpoint: str, with_tools: bool) -> None:
    """The pieces of a stream are the same as without the stop: text is held only while it can be part of one."""
    function = {"name": "f", "parameters": {"type": "object", "properties": {}}}
    fields: dict[str, Any] = {"seed": 4, "max_tokens": 20, **GREEDY}
    if with_tools and endpoint == "chat":
        fields["tools"] = [{"type": "function", "function": function}]
    way = Way(endpoint, stream=True)

    def pieces(**stop: Any) -> list[str]:
        events = events_of(way.post(cluster, **fields, **stop))
        found = [event["choices"][0] for event in events]
        return [text for c in found if (text := c.get("delta", c).get("content", c.get("text")))]

    assert pieces() == pieces(stop=[SIXTY, "☂☂" * 20])


def test_the_whole_list_of_stops_is_read_in_any_form(pd: Cluster, way: Way) -> None:
    """One text is a list of one; a wrong one is refused by its name."""
    text, _, _ = ask(pd, way, max_tokens=8)

    assert ask(pd, way, max_tokens=8, stop=text[3:5]) == ask(pd, way, max_tokens=8, stop=[text[3:5]])
    for wrong in ([None], [1], 5, {"a": 1}, [[text]]):
        response = way.post(pd, stop=wrong)
        assert response.status_code == 400
        assert response.json()["error"]["param"].startswith("stop")


def test_a_stop_frees_the_workers(cluster: Cluster) -> None:
    """What a stop ended is not generated any further."""
    way = Way("completions", stream=True)
    text, _, _ = ask(cluster, way, max_tokens=6)

    assert ask(cluster, way, max_tokens=3000, stop=text[-2:], ignore_eos=True)[2] <= 6

    cluster.check_nothing_left()
    assert 200 == http.get(f"{cluster.url}/ready").status_code

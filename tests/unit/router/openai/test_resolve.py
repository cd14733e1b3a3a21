"""Requests to work: ids, defaults, lengths and limits."""

from __future__ import annotations

import json
import re
from functools import partial
from itertools import count
from typing import Any

import pytest

from router.openai.requests import parse_chat, parse_completion
from router.openai.resolve import COMPLETION_MAX_TOKENS, MAX_ECHO_LOGPROBS, Plan, Resolver
from router.openai.shared_fields import Limits
from router.text.template import ChatTemplate
from router.text.tokenizer import TextTokenizer
from shared.errors import InvalidRequest, PromptTooLong
from shared.models.facts import ModelFacts
from shared.wire import Sampling, TokenOut

HI = [{"role": "user", "content": "hi"}]
CONTEXT = 100


class Requests:
    """Resolves request bodies for one model; seeds are 1000, 1001, ..."""

    def __init__(self, resolver: Resolver, facts: ModelFacts) -> None:
        self._resolver = resolver
        self._facts = facts
        self._seeds = count(1000)

    def completion(self, **body: Any) -> Plan:
        """A plan for a completion, with a prompt unless one is given."""
        request = parse_completion(json.dumps({"prompt": "Hi"} | body).encode(), Limits())
        return self._resolver.completion(request, self._facts, CONTEXT, lambda: next(self._seeds))

    def chat(self, **body: Any) -> Plan:
        """A plan for a chat, with a message unless some are given."""
        request = parse_chat(json.dumps({"messages": HI} | body).encode(), Limits())
        return self._resolver.chat(request, self._facts, CONTEXT, lambda: next(self._seeds))


@pytest.fixture
def requests(parts: tuple[TextTokenizer, ChatTemplate], facts: ModelFacts) -> Requests:
    """Requests without a server default for lengths."""
    return Requests(Resolver(*parts), facts)


def test_what_a_request_leaves_out_comes_from_the_checkpoint(requests: Requests) -> None:
    """generation_config's defaults apply on both endpoints, and nothing else is on."""
    expected = Sampling(
        temperature=0.7,
        top_p=0.8,
        top_k=20,
        repetition_penalty=1.1,
        seed=1000,
        max_tokens=COMPLETION_MAX_TOKENS,
    )

    assert expected == requests.completion().prompts[0].sampling
    chat = requests.chat().prompts[0]
    assert CONTEXT - len(chat.token_ids) == chat.sampling.max_tokens
    assert expected.temperature == chat.sampling.temperature


def test_a_request_can_turn_the_defaults_off(requests: Requests) -> None:
    """Explicit neutral values win over the checkpoint's, top_k -1 is off, and 0 is a temperature."""
    off = requests.completion(temperature=0, top_p=1, top_k=-1, repetition_penalty=1.0).prompts[0].sampling

    assert (0.0, 1.0, 0, 1.0) == (off.temperature, off.top_p, off.top_k, off.repetition_penalty)


def test_fields_arrive(requests: Requests) -> None:
    """Each field of the request reaches its place on the wire."""
    sampling = (
        requests.completion(
            max_tokens=9,
            min_tokens=2,
            min_p=0.1,
            presence_penalty=1,
            frequency_penalty=-1,
            logit_bias={"5": 1.5},
            seed=7,
            stop_token_ids=[3, 3, 4],
            ignore_eos=True,
            logprobs=3,
            temperature=1e-9,
            top_p=0,
        )
        .prompts[0]
        .sampling
    )

    assert (
        Sampling(
            temperature=1e-9,
            top_p=0.0,
            top_k=20,
            min_p=0.1,
            repetition_penalty=1.1,
            presence_penalty=1.0,
            frequency_penalty=-1.0,
            logit_bias={5: 1.5},
            seed=7,
            max_tokens=9,
            min_tokens=2,
            stop_token_ids=(3, 4),
            ignore_eos=True,
            num_logprobs=3,
        )
        == sampling
    )
    assert sampling == Sampling.model_validate_json(sampling.to_json())


def test_seeds(requests: Requests) -> None:
    """Negative seeds wrap, a given seed serves every prompt, and without one each prompt draws its own."""
    assert [2**64 - 1] * 2 == [
        p.sampling.seed for p in requests.completion(prompt=["a", "b"], seed=-1).prompts
    ]
    assert [1000, 1001] == [p.sampling.seed for p in requests.completion(prompt=["a", "b"]).prompts]


def test_prompts_of_every_form(requests: Requests, tokenizer: TextTokenizer) -> None:
    """Texts are tokenised with their control strings, ids are taken as they are, in order."""
    control = tokenizer.control_ids
    plan = requests.completion(prompt=["<|im_start|>user", "b"], n=2)

    assert control["<|im_start|>"] == plan.prompts[0].token_ids[0]
    assert tokenizer.encode("b") == plan.prompts[1].token_ids
    assert 2 == plan.num_choices
    assert [[5], [7, 8]] == [p.token_ids for p in requests.completion(prompt=[[5], [7, 8]]).prompts]


def test_chat_opens_the_assistants_turn(requests: Requests, tokenizer: TextTokenizer) -> None:
    """By default a new turn is opened; it can be left out, or the last message continued."""
    messages = [*HI, {"role": "assistant", "content": "Well, "}]

    def text(**body: Any) -> str:
        return tokenizer.decode(requests.chat(**body).prompts[0].token_ids, skip_special=False)

    assert text().endswith("<|im_start|>assistant\n")
    assert text(add_generation_prompt=False).endswith("hi<|im_end|>\n")
    assert text(messages=messages, continue_final_message=True).endswith("assistant\nWell, ")
    assert text(messages=messages).endswith("Well, <|im_end|>\n<|im_start|>assistant\n")


@pytest.mark.parametrize(
    ("field", "body"),
    [
        ("prompt", {"prompt": [1_000_000]}),
        ("prompt", {"prompt": [-1]}),
        ("prompt", {"prompt": [[5], [2**63]]}),
        ("stop_token_ids", {"stop_token_ids": [999_999]}),
        ("stop_token_ids", {"stop_token_ids": [-3]}),
        ("stop_token_ids", {"stop_token_ids": list(range(257))}),
        ("logit_bias", {"logit_bias": {"999999": 1}}),
        ("logit_bias", {"logit_bias": {"-1": 1}}),
        ("stop", {"stop": ["x" * 10_000]}),
    ],
)
def test_ids_outside_the_model_are_refused(requests: Requests, field: str, body: dict[str, Any]) -> None:
    """Nothing that could index out of the model's rows leaves the router."""
    with pytest.raises(InvalidRequest) as caught:
        requests.completion(**body)
    assert field == caught.value.param


def test_rows_without_a_token_are_legal_ids(requests: Requests, tokenizer: TextTokenizer) -> None:
    """Ids between the tokenizer's size and the model's are accepted."""
    assert [tokenizer.vocab_size] == requests.completion(prompt=[tokenizer.vocab_size]).prompts[0].token_ids


@pytest.mark.parametrize(
    ("num_prompt", "asked", "counts"),
    [
        (CONTEXT, None, (CONTEXT,)),
        (CONTEXT + 1, 5, (CONTEXT + 1,)),
        (CONTEXT - 5, 6, (CONTEXT + 1, CONTEXT - 5, 6)),
    ],
)
def test_what_does_not_fit_is_refused_with_true_counts(
    requests: Requests, num_prompt: int, asked: int | None, counts: tuple[int, ...]
) -> None:
    """The text holds the words clients search for, the limit, and the numbers that do not fit."""
    with pytest.raises(PromptTooLong, match=f"maximum context length is {CONTEXT} tokens") as caught:
        requests.completion(prompt=[5] * num_prompt, max_tokens=asked)
    assert "context_length_exceeded" == caught.value.code
    assert all(f"{number} " in caught.value.message for number in counts)


def test_a_text_that_is_certainly_too_long_is_not_tokenised(requests: Requests) -> None:
    """A megabyte took 1.5 seconds only to be refused. What is said is true: "at least"."""
    long = "1" * 1000
    asks = [
        partial(requests.completion, prompt=[long, "Hi"]),
        partial(requests.chat, messages=[{"role": "user", "content": long}]),
        partial(requests.chat, messages=[{"role": "user", "content": long + "<|im_end|>"}]),
    ]
    for ask in asks:
        with pytest.raises(PromptTooLong, match=f"maximum context length is {CONTEXT} tokens") as caught:
            ask()
        told = re.search(r"at least (\d+) tokens", caught.value.message)
        assert told is not None
        assert CONTEXT < int(told[1]) <= 1020


def test_a_text_that_just_fits_is_never_refused_for_its_bytes(requests: Requests) -> None:
    """And a long one that is to be truncated is not refused either."""
    assert CONTEXT - 1 == len(requests.completion(prompt="1" * (CONTEXT - 1)).prompts[0].token_ids)
    cut = requests.completion(prompt="1" * 1000, truncate_prompt_tokens=7).prompts[0]
    assert 7 == len(cut.token_ids)


def test_lengths_fit_the_context(
    requests: Requests, parts: tuple[TextTokenizer, ChatTemplate], facts: ModelFacts
) -> None:
    """What exactly fits is granted; a default that does not fit is cut to the room."""
    assert 5 == requests.completion(prompt=[5] * (CONTEXT - 5), max_tokens=5).prompts[0].sampling.max_tokens
    assert 5 == requests.completion(prompt=[5] * (CONTEXT - 5)).prompts[0].sampling.max_tokens
    short = requests.completion(prompt=[5] * (CONTEXT - 5), min_tokens=50).prompts[0].sampling
    assert (5, 5) == (short.max_tokens, short.min_tokens)
    server = Requests(Resolver(*parts, default_max_tokens=3), facts)
    assert 3 == server.chat().prompts[0].sampling.max_tokens
    assert 3 == server.completion().prompts[0].sampling.max_tokens


def test_a_special_stop_is_a_stop_token(requests: Requests, tokenizer: TextTokenizer) -> None:
    """Stops that are special tokens travel to the workers; text stops stay here."""
    plan = requests.chat(stop=["<|im_end|>", "x"], stop_token_ids=[5])

    assert (5, tokenizer.control_ids["<|im_end|>"]) == plan.prompts[0].sampling.stop_token_ids
    assert ("<|im_end|>", "x") == plan.stops.stops


def test_choice_texts_come_from_the_plan(requests: Requests, tokenizer: TextTokenizer) -> None:
    """A choice's text pipeline has the request's stops and min_tokens."""
    plan = requests.completion(stop=",", min_tokens=2, max_tokens=9)
    choice = plan.choice_text(tokenizer, 0)
    text = "".join(choice.push(TokenOut(choice=0, token_id=i)).text for i in tokenizer.encode("1,2,3"))

    assert ("1,2", True) == (text, choice.stopped_early)


def test_stream_options_arrive(requests: Requests) -> None:
    """Usage options are in the plan; off unless asked for."""
    on = requests.chat(stream=True, stream_options={"include_usage": True, "continuous_usage_stats": True})
    off = requests.chat(stream=True, stream_options={"include_usage": False})

    assert (True, True) == (on.include_usage, on.continuous_usage)
    assert (False, False, False) == (off.include_usage, off.continuous_usage, off.logprobs)


def test_echoed_logprobs_are_bounded(requests: Requests) -> None:
    """Choices by tokens by numbers: one small request once asked for an answer of a gigabyte."""
    body: dict[str, Any] = {"n": 128, "echo": True, "max_tokens": 0, "logprobs": 20}
    assert 128 * 8 * 97 * 21 <= MAX_ECHO_LOGPROBS < 128 * 8 * 98 * 21
    assert 8 == len(requests.completion(prompt=[[1] * 97] * 8, **body).echoes)
    with pytest.raises(InvalidRequest, match=f"at most {MAX_ECHO_LOGPROBS} are allowed") as refused:
        requests.completion(prompt=[[1] * 98] * 8, **body)
    assert "logprobs" == refused.value.param
    assert 8 == len(requests.completion(prompt=[[1] * 98] * 8, **body | {"logprobs": None}).echoes)


def test_an_echo_is_made_with_the_plan(requests: Requests) -> None:
    """That may be in a thread: spelling the ids of a long body once held up the event loop."""
    plan = requests.completion(prompt=["Hi", "there"], echo=True)
    assert ["Hi", "there"] == [echo.text for echo in plan.echoes]
    assert () == requests.completion(prompt="Hi").echoes


def test_prompt_logprobs_are_asked_for_by_echo_with_logprobs(requests: Requests) -> None:
    """Neither of the two alone makes a worker score the prompt."""
    scored = [
        requests.completion(**body).prompts[0].sampling.num_prompt_logprobs
        for body in ({"echo": True}, {"logprobs": 3}, {"echo": True, "logprobs": 3})
    ]

    assert [None, None, 3] == scored


def test_best_of_draws_more_than_it_shows(requests: Requests) -> None:
    """The draws carry logprobs, which are not shown unless asked for."""
    plan = requests.completion(n=2, best_of=5)

    assert (5, 2, False) == (plan.num_choices, plan.num_shown, plan.logprobs)
    assert 0 == plan.prompts[0].sampling.num_logprobs
    assert 2 == len(plan.prompt_ids())
    assert requests.completion(n=2, best_of=2).prompts[0].sampling.num_logprobs is None


def test_no_tokens_may_be_asked_for_up_to_the_end_of_the_context(requests: Requests) -> None:
    """A prompt that fills the context can be scored, and no more."""
    assert 0 == requests.completion(prompt=[1] * CONTEXT, max_tokens=0).prompts[0].sampling.max_tokens
    for too_much in ({"prompt": [1] * (CONTEXT + 1), "max_tokens": 0}, {"prompt": [1] * CONTEXT}):
        with pytest.raises(PromptTooLong):
            requests.completion(**too_much)


def test_a_long_prompt_may_be_cut_to_its_end(requests: Requests) -> None:
    """A number keeps as many tokens, -1 what leaves room for the answer."""
    ids = list(range(1, 121))

    cut = [
        requests.completion(prompt=ids, max_tokens=10, truncate_prompt_tokens=keep).prompts[0].token_ids
        for keep in (5, -1)
    ]

    assert [ids[-5:], ids[-(CONTEXT - 10) :]] == cut

"""Constrained answers over real sockets: noise weights give what was asked for, wherever computed."""

from __future__ import annotations

import json
import re
from concurrent.futures import ThreadPoolExecutor
from typing import Any, Literal

import httpx
import jsonschema
import openai
import pytest
from openai.types.chat import ChatCompletion
from pydantic import BaseModel, Field

from shared.wire import DecodeEvent, DecodeRequest, Grammar, Sampling
from tests.support.cluster import AUTH, Cluster
from tests.support.completions import complete, random_prompt, token_ids

HI: list[dict[str, Any]] = [{"role": "user", "content": "Describe a cat."}]
WARM: dict[str, Any] = {"temperature": 1.0, "repetition_penalty": 1.0, "top_p": 1, "top_k": -1}
NODE: dict[str, Any] = {
    "type": "object",
    "properties": {"v": {"enum": [1, 2]}, "next": {"anyOf": [{"$ref": "#/$defs/node"}, {"type": "null"}]}},
    "required": ["v", "next"],
    "additionalProperties": False,
}
SCHEMAS: dict[str, dict[str, Any]] = {
    "enum": {"enum": ["red", "grün", "青", 5, None]},
    "nested": {
        "type": "object",
        "properties": {
            "a": {
                "type": "object",
                "properties": {"b": {"type": "boolean"}},
                "required": ["b"],
                "additionalProperties": False,
            },
            "c": {"type": "string", "maxLength": 5},
        },
        "required": ["a", "c"],
        "additionalProperties": False,
    },
    "array": {"type": "array", "items": {"type": "integer", "minimum": -5, "maximum": 300}, "maxItems": 4},
    "union": {"anyOf": [{"type": "boolean"}, {"type": "string", "pattern": "^[a-c]{2,4}$"}]},
    "recursive": {"$defs": {"node": NODE}, "$ref": "#/$defs/node"},
    "date": {"type": "string", "format": "date"},
    "tuple": {
        "type": "array",
        "prefixItems": [{"const": "x"}, {"type": "null"}],
        "items": False,
        "minItems": 2,
    },
}


class Cat(BaseModel):
    """What the client library is asked for."""

    name: str = Field(max_length=8)
    colour: Literal["black", "white"]
    lives: Literal[1, 9]


def chat(cluster: Cluster, **fields: Any) -> ChatCompletion:
    """A whole answer, as the client library's type."""
    body = {"model": "tiny", "messages": HI, "max_tokens": 400, **WARM} | fields
    response = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=60)
    assert response.status_code == 200, response.text
    return ChatCompletion.model_validate(response.json())


def schema_format(schema: dict[str, Any]) -> dict[str, Any]:
    """As the API has it."""
    return {"type": "json_schema", "json_schema": {"name": "answer", "schema": schema, "strict": True}}


@pytest.mark.parametrize("name", SCHEMAS)
def test_answers_are_instances_of_the_schema(pd: Cluster, name: str) -> None:
    """All choices that were not cut by length; those are rare enough that some always are whole."""
    answer = chat(pd, response_format=schema_format(SCHEMAS[name]), n=8, seed=1)

    whole = [c.message.content for c in answer.choices if c.finish_reason == "stop"]
    assert whole
    for content in whole:
        jsonschema.validate(json.loads(content or ""), SCHEMAS[name])


@pytest.mark.parametrize(
    ("fields", "pattern"),
    [
        ({"guided_choice": ["yes", "no", "may be"]}, "yes|no|may be"),
        ({"guided_regex": r"\d{3}-[a-c]{2}"}, r"\d{3}-[a-c]{2}"),
        ({"guided_regex": r"^(cat|dog)$"}, "cat|dog"),
        ({"guided_grammar": 'root ::= "(" [0-9] ")" | "none"'}, r"\(\d\)|none"),
        ({"structured_outputs": {"grammar": 'start: "a" ("b" | "c")'}}, "ab|ac"),
        ({"structured_outputs": {"choice": ["é", "ü"]}}, "é|ü"),
        ({"guided_json": {"const": {"a": "é"}}}, r'\s*\{\s*"a"\s*:\s*"é"\s*\}\s*'),
    ],
)
@pytest.mark.parametrize("path", ["chat/completions", "completions"])
def test_every_kind_of_form_holds_on_both_endpoints_streamed_and_not(
    pd: Cluster, path: str, fields: dict[str, Any], pattern: str
) -> None:
    """And both give the same text."""
    prompt: dict[str, Any] = {"messages": HI} if path.startswith("chat") else {"prompt": "Hello"}
    body = {"model": "tiny", "max_tokens": 100, "seed": 3, **WARM} | prompt | fields
    url = f"{pd.url}/v1/{path}"

    choice = httpx.post(url, json=body, timeout=60).json()["choices"][0]
    streamed = httpx.post(url, json=body | {"stream": True}, timeout=60).text
    events = [json.loads(line[6:]) for line in streamed.splitlines() if line.startswith("data: {")]
    chunks = [event["choices"][0] for event in events]

    text = choice["message"]["content"] if "message" in choice else choice["text"]
    joined = "".join(c["delta"].get("content") or "" if "delta" in c else c["text"] for c in chunks)
    assert re.fullmatch(pattern, text)
    assert text == joined
    assert ["stop", "stop"] == [choice["finish_reason"], chunks[-1]["finish_reason"]]


def test_json_mode_gives_an_object_without_runs_of_white_space(pd: Cluster) -> None:
    """A model of noise would go on for ever; what it writes is a beginning of JSON with bounded white space."""
    answer = chat(pd, response_format={"type": "json_object"}, n=8, seed=2, max_tokens=80)

    for choice in answer.choices:
        content = choice.message.content or ""
        outside = re.sub(r'"(\\.|[^"\\])*("|$)', '""', content)
        assert content.startswith("{")
        assert not re.search(r"\s{22}|\n\s*\n", outside)
        if choice.finish_reason == "stop":
            assert isinstance(json.loads(content), dict)


@pytest.mark.parametrize("n", [1, 3])
def test_pd_unified_and_a_batch_give_the_same_tokens(pd: Cluster, unified: Cluster, n: int) -> None:
    """Constrained and free requests side by side, each as if it were alone."""
    shared: dict[str, Any] = {"n": n, "max_tokens": 40, **WARM}
    requests = [
        shared | ({"guided_json": SCHEMAS[name]} if name else {"ignore_eos": True}) | {"seed": seed}
        for seed, name in enumerate([*SCHEMAS, None, None, None])
    ]

    def ask(cluster: Cluster, index: int) -> list[list[int]]:
        return token_ids(complete(cluster, random_prompt(10 + 7 * index, seed=index), **requests[index]))

    alone = [ask(pd, index) for index in range(len(requests))]
    with ThreadPoolExecutor(len(requests)) as threads:
        together = list(threads.map(lambda index: ask(pd, index), range(len(requests))))
        in_unified = list(threads.map(lambda index: ask(unified, index), range(len(requests))))

    assert alone == together
    assert alone == in_unified


def test_a_worker_that_takes_over_goes_on_with_the_same_tokens(unified: Cluster) -> None:
    """The grammar's state is rebuilt from the tokens so far; nothing else of it is ever sent."""
    prompt = random_prompt(20, seed=40)
    grammar = Grammar(kind="json_schema", text=json.dumps(SCHEMAS["nested"]))
    sampling = Sampling(max_tokens=200, seed=7, grammar=grammar)

    def decode(generated: list[int]) -> list[int]:
        work = DecodeRequest(
            request_id=f"r{len(generated)}",
            token_ids=prompt + generated,
            num_prompt_tokens=len(prompt),
            sampling=sampling,
            timeout_s=60,
            mode="local",
        )
        url = f"{unified.decode[0].url}/v1/decode"
        lines = httpx.post(url, content=work.to_json(), headers=AUTH, timeout=60).text.splitlines()
        events = [DecodeEvent.model_validate_json(line) for line in lines]
        made = [token for e in events for token in (e.first.tokens if e.first else e.tokens or [])]
        assert "stop" == made[-1].finish_reason
        return [token.token_id for token in made]

    whole = decode([])

    for cut in (1, len(whole) // 2, len(whole) - 1):
        assert whole == whole[:cut] + decode(whole[:cut])


def test_a_worker_refuses_a_bad_grammar_itself(unified: Cluster) -> None:
    """Whoever calls it directly gets the same 400."""
    sampling = Sampling(max_tokens=5, grammar=Grammar(kind="regex", text="(a"))
    work = DecodeRequest(
        request_id="bad", token_ids=[1], num_prompt_tokens=1, sampling=sampling, timeout_s=60, mode="local"
    )

    response = httpx.post(f"{unified.decode[0].url}/v1/decode", content=work.to_json(), headers=AUTH)

    assert 400 == response.status_code
    assert "sampling.grammar" == response.json()["error"]["param"]


EMPTY = r"[^\x00-\U0010FFFF]"
NO_TOKEN = "start: <[99999]>"


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"guided_regex": EMPTY}, "guided_regex"),
        ({"guided_grammar": NO_TOKEN}, "guided_grammar"),
        ({"structured_outputs": {"regex": EMPTY}}, "structured_outputs.regex"),
        ({"structured_outputs": {"grammar": NO_TOKEN}}, "structured_outputs.grammar"),
    ],
)
def test_what_only_a_worker_can_refuse_is_told_in_the_clients_words(
    pd: Cluster, stream: bool, fields: dict[str, Any], param: str
) -> None:
    """The field was our own, sampling.grammar, and the reason a name of the library's, NoExtensionBias."""
    body = {"messages": HI, "stream": stream, **fields}

    response = httpx.post(f"{pd.url}/v1/chat/completions", json=body, timeout=60)

    error = response.json()["error"]
    assert (400, param) == (response.status_code, error["param"])
    assert error["message"].startswith(f"{param} cannot be used: ")
    assert "NoExt" not in error["message"]


def test_a_way_that_ends_nowhere_is_told_in_the_clients_words(pd: Cluster) -> None:
    """In the middle of an answer too."""
    body = {"messages": HI, "guided_grammar": f'start: "ab" X\nX: /{EMPTY}/', "stream": True}

    response = httpx.post(f"{pd.url}/v1/chat/completions", json=body, timeout=60)

    assert '"param":"guided_grammar"' in response.text
    assert "guided_grammar leads no further: nothing can match it" in response.text


def test_choices_are_answered_as_text_or_not_at_all(pd: Cluster) -> None:
    """A choice that is a token's own text was generated as that token: the end token's was an empty answer."""
    for text in ("<|im_end|>", "a<|im_start|>", "<tool_call>b"):
        body = {"messages": HI, "guided_choice": [text]}
        error = httpx.post(f"{pd.url}/v1/chat/completions", json=body, timeout=60).json()["error"]
        assert ("guided_choice", True) == (error["param"], "a token of its own" in error["message"])

    assert "<|im_start" == chat(pd, guided_choice=["<|im_start"]).choices[0].message.content


def test_a_grammar_wins_over_min_tokens(pd: Cluster) -> None:
    """Where nothing but an end or a stop token can come, the answer ends, however short it is."""
    body = {"prompt": "x", "guided_choice": ["ab"], "min_tokens": 5}
    stop_id = httpx.post(f"{pd.url}/tokenize", json={"prompt": "b"}).json()["tokens"][-1]

    for more, expected in (({}, "ab"), ({"stop_token_ids": [stop_id]}, "a")):
        answer = httpx.post(f"{pd.url}/v1/completions", json={**body, **more}, timeout=60).json()["choices"][
            0
        ]
        assert ("stop", expected) == (answer["finish_reason"], answer["text"])


def test_too_many_choices_are_blamed_on_what_asked_for_them(pd: Cluster) -> None:
    """It was n, also where best_of alone was sent."""
    for name in ("n", "best_of"):
        response = httpx.post(
            f"{pd.url}/v1/completions", json={"prompt": "x", name: 128, "max_tokens": 2}, timeout=60
        )

        assert (400, name) == (response.status_code, response.json()["error"]["param"])


def test_logprobs_of_a_constrained_answer_are_finite_and_one_per_token(pd: Cluster) -> None:
    """What is ruled out shows as a very low number, never as infinity."""
    answer = chat(pd, guided_choice=["yes", "no"], logprobs=True, top_logprobs=5)

    logprobs = answer.choices[0].logprobs
    assert answer.usage
    assert logprobs
    assert logprobs.content
    assert answer.usage.completion_tokens - 1 == len(logprobs.content)
    assert all(-9999 <= top.logprob <= 0 for entry in logprobs.content for top in entry.top_logprobs)


def test_the_client_library_parses_into_its_models(pd: Cluster) -> None:
    """`.parse` and `.stream` with a pydantic model."""
    client = openai.OpenAI(base_url=f"{pd.url}/v1", api_key="x", max_retries=0)
    arguments: dict[str, Any] = {
        "model": "tiny",
        "messages": HI,
        "response_format": Cat,
        "max_tokens": 200,
        "temperature": 1.0,
        "seed": 4,
    }

    parsed = client.chat.completions.parse(**arguments)
    with client.chat.completions.stream(**arguments) as stream:
        streamed = stream.get_final_completion()

    cat = parsed.choices[0].message.parsed
    assert isinstance(cat, Cat)
    assert cat == streamed.choices[0].message.parsed


def test_a_grammar_that_no_answer_can_follow_is_refused_before_work(pd: Cluster) -> None:
    """With the field's name, and without any worker having seen it."""
    before = pd.prefill[0].metric("handoff_prefill_requests_total")

    response = httpx.post(
        f"{pd.url}/v1/completions", json={"prompt": "x", "guided_json": {"type": "wat"}}, timeout=60
    )

    assert 400 == response.status_code
    assert "guided_json" == response.json()["error"]["param"]
    assert before == pd.prefill[0].metric("handoff_prefill_requests_total")


@pytest.mark.parametrize(
    "fields",
    [
        {"guided_json": {"type": "integer", "multipleOf": 3_000_017}},
        {"guided_grammar": 'start: %json {"type": "integer", "multipleOf": 3000017}'},
        {"guided_regex": "a?" * 20_000},
    ],
)
def test_a_small_form_of_much_work_is_refused_at_once(pd: Cluster, fields: dict[str, Any]) -> None:
    """Two such requests stopped all structured output of the workers for as long as they took."""
    response = httpx.post(f"{pd.url}/v1/completions", json={"prompt": "x"} | fields, timeout=60)

    assert 400 == response.status_code
    assert next(iter(fields)) == response.json()["error"]["param"]
    assert "more than" in response.json()["error"]["message"]


def test_nothing_is_left_behind(pd: Cluster) -> None:
    """After all of the above."""
    chat(pd, guided_choice=["yes"])
    pd.check_nothing_left()

"""Who may call the router: keys on every route, pages of other origins, and the routes beside the two endpoints."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from router.app import EXPOSED_HEADERS
from router.text.tokenizer import TextTokenizer
from tests.integration.test_bad_input import HI, check_error
from tests.support.cluster import Cluster, run_cluster

KEYS = ("key-a-0123456789", "key-b-0123456789")
ORIGIN = "http://page.example"
OPEN = {"/health", "/ready", "/metrics"}


@pytest.fixture(scope="module")
def guarded(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A router with two keys in a file that serves the pages of one origin."""
    path = tmp_path_factory.mktemp("keys") / "keys"
    path.write_text("\n".join(KEYS))
    router: dict[str, Any] = {"api_key_file": path, "cors_origins": (ORIGIN,)}
    with run_cluster(tiny_model, num_prefill=0, router=router) as cluster:
        yield cluster


def bearer(key: str, scheme: str = "Bearer") -> dict[str, str]:
    """A header with this key."""
    return {"Authorization": f"{scheme} {key}"}


def test_every_route_but_the_state_ones_wants_a_key(guarded: Cluster) -> None:
    """Of all routes in the router's own description, without a key and with wrong ones."""
    paths = httpx.get(f"{guarded.url}/openapi.json", headers=bearer(KEYS[0])).json()["paths"]
    assert {"/v1/chat/completions", "/tokenize", *OPEN} <= set(paths)
    for path, methods in [*paths.items(), ("/openapi.json", ["get"]), ("/nothing", ["get"])]:
        for method in methods:
            for headers in (
                {},
                bearer("key-c-0123456789"),
                bearer(KEYS[0], "Basic"),
                {"Authorization": "Bearer"},
            ):
                response = httpx.request(method.upper(), guarded.url + path, headers=headers)
                if path in OPEN:
                    assert 200 == response.status_code, path
                else:
                    check_error(response, 401)
                    assert "Bearer" == response.headers["www-authenticate"]


def test_each_key_of_the_file_opens(guarded: Cluster) -> None:
    """In any case of the scheme's name."""
    for headers in (bearer(KEYS[0]), bearer(KEYS[1]), bearer(KEYS[1], "bearer")):
        assert 200 == httpx.get(f"{guarded.url}/v1/models", headers=headers).status_code


def test_preflights_need_no_key_and_say_what_is_allowed(guarded: Cluster) -> None:
    """A browser asks before it sends the key."""
    asked = {
        "Origin": ORIGIN,
        "Access-Control-Request-Method": "POST",
        "Access-Control-Request-Headers": "authorization,content-type",
    }
    response = httpx.options(f"{guarded.url}/v1/chat/completions", headers=asked)

    assert 200 == response.status_code
    assert ORIGIN == response.headers["access-control-allow-origin"]
    allowed = response.headers["access-control-allow-headers"].lower().split(",")
    assert {"authorization", "content-type"} <= {name.strip() for name in allowed}
    foreign = httpx.options(f"{guarded.url}/v1/chat/completions", headers=asked | {"Origin": "http://x"})
    assert "access-control-allow-origin" not in foreign.headers


def test_errors_and_streams_can_be_read_by_pages(guarded: Cluster) -> None:
    """400, 401, 404, 413, whole answers and streams carry the headers, timing exposed."""
    url, key = f"{guarded.url}/v1/chat/completions", bearer(KEYS[0]) | {"Origin": ORIGIN}
    body = {"messages": HI, "max_tokens": 3}
    answers = [
        httpx.post(url, json=body, headers=key),
        httpx.post(url, json=body | {"stream": True}, headers=key),
        httpx.post(url, json={}, headers=key),
        httpx.post(url, json=body, headers={"Origin": ORIGIN}),
        httpx.get(f"{guarded.url}/nothing", headers=key),
        httpx.post(url, content=b"x" * (17 << 20), headers=key),
    ]

    assert [200, 200, 400, 401, 404, 413] == [answer.status_code for answer in answers]
    for answer in answers:
        assert ORIGIN == answer.headers["access-control-allow-origin"]
        exposed = answer.headers["access-control-expose-headers"].lower().split(", ")
        assert set(EXPOSED_HEADERS) <= set(exposed)
    assert "server-timing" in answers[0].headers
    assert "server-timing" in answers[1].headers


def test_cors_is_off_by_default(unified: Cluster) -> None:
    """A page of another origin gets nothing that it could read."""
    response = httpx.get(f"{unified.url}/v1/models", headers={"Origin": ORIGIN})

    assert 200 == response.status_code
    assert not any(name.startswith("access-control") for name in response.headers)


@pytest.mark.parametrize("prefix", ["", "/v1"])
def test_tokenize_and_detokenize_undo_each_other(unified: Cluster, tiny_model: Path, prefix: str) -> None:
    """Also over special tokens; counts and strings go with the ids."""
    text = "<|im_start|>user\nZoë 🚀 12<|im_end|>\n"
    ids = TextTokenizer.load(tiny_model).encode(text)

    told = httpx.post(
        f"{unified.url}{prefix}/tokenize", json={"model": "tiny", "prompt": text, "return_token_strs": True}
    ).json()
    back = httpx.post(f"{unified.url}{prefix}/detokenize", json={"model": "tiny", "tokens": ids}).json()

    assert (ids, len(ids), 4096) == (told["tokens"], told["count"], told["max_model_len"])
    assert len(ids) == len(told["token_strs"])
    assert {"prompt": text} == back


def test_a_tokenized_conversation_is_what_chat_counts(unified: Cluster) -> None:
    """The same template, the same ids."""
    told = httpx.post(f"{unified.url}/tokenize", json={"messages": HI}).json()
    chat = httpx.post(
        f"{unified.url}/v1/chat/completions", json={"messages": HI, "max_tokens": 1, "return_token_ids": True}
    ).json()

    assert chat["choices"][0]["prompt_token_ids"] == told["tokens"]
    assert chat["usage"]["prompt_tokens"] == told["count"]


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/tokenize", {}, 400),
        ("/tokenize", {"prompt": 5}, 400),
        ("/tokenize", {"prompt": ["a"]}, 400),
        ("/tokenize", {"messages": []}, 400),
        ("/tokenize", {"prompt": "x", "model": "other"}, 404),
        ("/detokenize", {}, 400),
        ("/detokenize", {"tokens": "abc"}, 400),
        ("/detokenize", {"tokens": [10**9]}, 400),
        ("/detokenize", {"tokens": [-1]}, 400),
        ("/v1/embeddings", {"input": "x"}, 404),
        ("/v1/audio/speech", {}, 404),
    ],
)
def test_what_cannot_be_answered_is_told_in_the_one_shape(
    unified: Cluster, path: str, body: dict[str, Any], status: int
) -> None:
    """Wrong bodies, other models, endpoints that are not here."""
    check_error(httpx.post(f"{unified.url}{path}", json=body), status)


def test_models_tell_their_context(unified: Cluster) -> None:
    """Listed and by name; a name that is not served is a 404."""
    (model,) = httpx.get(f"{unified.url}/v1/models").json()["data"]

    assert ("tiny", "model", 4096) == (model["id"], model["object"], model["max_model_len"])
    assert model == httpx.get(f"{unified.url}/v1/models/tiny").json()
    check_error(httpx.get(f"{unified.url}/v1/models/other/one"), 404)

"""Fields that vLLM's clients send as a matter of course, and what becomes of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer
from tokenizers.processors import TemplateProcessing

from router.openai.logprobs import chat_logprobs, completion_logprobs
from router.openai.requests import parse_chat, parse_completion
from router.openai.resolve import Plan, Resolver
from router.openai.shared_fields import Limits
from router.text.choice import Piece
from router.text.template import ChatTemplate
from router.text.tokenizer import TextTokenizer
from shared.models.facts import ModelFacts
from shared.wire import Logprobs, TokenOut
from tests.support.tiny_tokenizer import write_tiny_tokenizer


class Site:
    """Plans of one tokenizer's model."""

    def __init__(self, tokenizer: TextTokenizer, template: ChatTemplate, facts: ModelFacts) -> None:
        self.tokenizer = tokenizer
        self._resolver = Resolver(tokenizer, template)
        self._facts = facts

    def completion(self, **fields: Any) -> Plan:
        """Of a short prompt."""
        body = json.dumps({"prompt": "Hi", **fields}).encode()
        return self._resolver.completion(parse_completion(body, Limits()), self._facts, 4096, lambda: 1)

    def chat(self, content: str = "Hi", **fields: Any) -> Plan:
        """Of a short message."""
        body = json.dumps({"messages": [{"role": "user", "content": content}], **fields}).encode()
        return self._resolver.chat(parse_chat(body, Limits()), self._facts, 4096, lambda: 1)

    def answer(self, plan: Plan) -> Piece:
        """The answer "a<|im_start|>b", each token with a logprob."""
        ids = self.tokenizer.encode("a<|im_start|>b")
        text = plan.choice_text(self.tokenizer, 0)
        pieces = [
            text.push(TokenOut(choice=0, token_id=i, logprobs=Logprobs(token=-0.5, top=[(i, -0.5)])))
            for i in ids
        ]
        pieces.append(text.abandon("length"))
        entries = tuple(entry for piece in pieces for entry in piece.entries)
        return Piece("".join(piece.text for piece in pieces), entries)


@pytest.fixture
def site(parts: tuple[TextTokenizer, ChatTemplate], facts: ModelFacts) -> Site:
    """The tiny model."""
    return Site(*parts, facts)


@pytest.fixture(scope="module")
def with_bos(tmp_path_factory: pytest.TempPathFactory) -> tuple[TextTokenizer, ChatTemplate]:
    """The tiny model's tokenizer, had it a BOS token."""
    folder: Path = tmp_path_factory.mktemp("bos")
    write_tiny_tokenizer(folder)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    bos = tokenizer.token_to_id("<|endoftext|>")
    tokenizer.post_processor = TemplateProcessing(
        single="<|endoftext|> $A", special_tokens=[("<|endoftext|>", bos)]
    )
    return TextTokenizer(tokenizer), ChatTemplate.load(folder)


@pytest.mark.parametrize("endpoint", ["completion", "chat"])
def test_special_tokens_can_be_shown(site: Site, endpoint: str) -> None:
    """By default they are no text; with skip_special_tokens false they are, and their bytes with them."""
    plan = getattr(site, endpoint)
    hidden = site.answer(plan())
    shown = site.answer(plan(skip_special_tokens=False))

    assert ("ab", "a<|im_start|>b") == (hidden.text, shown.text)
    content = chat_logprobs(shown.entries, site.tokenizer)["content"]
    assert shown.text.encode() == bytes(byte for entry in content for byte in entry["bytes"])
    assert content[1]["bytes"] == content[1]["top_logprobs"][0]["bytes"]
    assert "ab" == "".join(completion_logprobs(hidden.entries, site.tokenizer)["tokens"])


def test_special_tokens_can_be_shown_beside_tools(site: Site) -> None:
    """The pipeline that looks for calls shows them too."""
    tool = {"type": "function", "function": {"name": "f"}}

    assert "a<|im_start|>b" == site.answer(site.chat(tools=[tool], skip_special_tokens=False)).text


def test_logprobs_can_name_tokens_by_their_ids(site: Site) -> None:
    """On both endpoints, chosen and best alike."""
    ids = site.tokenizer.encode("a<|im_start|>b")
    names = [f"token_id:{i}" for i in ids]
    plan = site.completion(return_tokens_as_token_ids=True, logprobs=1)
    entries = site.answer(plan).entries

    assert plan.by_id
    lists = completion_logprobs(entries, site.tokenizer, by_id=True)
    assert names == lists["tokens"] == [name for best in lists["top_logprobs"] for name in best]
    content = chat_logprobs(entries, site.tokenizer, by_id=True)["content"]
    assert names == [e["token"] for e in content] == [e["top_logprobs"][0]["token"] for e in content]


@pytest.mark.parametrize("content", ["Hi", "Hi<|im_end|>"])
def test_a_bos_token_comes_if_it_is_wanted(
    with_bos: tuple[TextTokenizer, ChatTemplate], facts: ModelFacts, content: str
) -> None:
    """By default before plain text and not before a chat, whose template has it already if it wants it."""
    site = Site(*with_bos, facts)
    (bos,) = site.tokenizer.bos_ids

    def first(plan: Plan) -> list[int]:
        return plan.prompts[0].token_ids

    assert [bos, *first(site.completion(add_special_tokens=False))] == first(site.completion())
    assert [bos, *first(site.chat(content))] == first(site.chat(content, add_special_tokens=True))
    assert bos not in first(site.chat(content))


def test_without_a_bos_token_there_is_nothing_to_add(site: Site) -> None:
    """As with Qwen2.5."""
    assert [] == site.tokenizer.bos_ids
    assert site.chat().prompts == site.chat(add_special_tokens=True).prompts
    assert site.completion().prompts == site.completion(add_special_tokens=False).prompts

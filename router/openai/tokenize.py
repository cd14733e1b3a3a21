"""Bodies of /tokenize and /detokenize, in the shapes that vLLM gave them.

tokenize: {"prompt": text} or what a chat has ("messages", ...) -> {count, max_model_len, tokens, token_strs}.
detokenize: {"tokens": ids} -> {prompt}. Special tokens are shown.
"""

from __future__ import annotations

from typing import Any

from pydantic import BaseModel, ConfigDict

from router.openai.body import parse_body
from router.openai.requests import parse_chat
from router.openai.resolve import Resolver
from router.openai.shared_fields import Limits
from router.text.tokenizer import TextTokenizer
from shared.asgi.validation import validated
from shared.errors import InvalidRequest
from shared.models.facts import ModelFacts


class _Tokenize(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    model: str | None = None
    prompt: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class _Detokenize(BaseModel):
    model_config = ConfigDict(strict=True, frozen=True)

    model: str | None = None
    tokens: list[int]


class TokenizerApi:
    """Pure computation: thread-safe, slow only for long text."""

    def __init__(self, tokenizer: TextTokenizer, resolver: Resolver, facts: ModelFacts) -> None:
        self._tokenizer = tokenizer
        self._resolver = resolver
        self._facts = facts

    def tokenize(self, body: bytes, max_model_len: int) -> tuple[str | None, dict[str, Any]]:
        """The model that the request names, and the answer. Raises InvalidRequest."""
        content = parse_body(body)
        request = validated(content, _Tokenize)
        if content.get("messages") not in (None, []):
            ids = self._resolver.conversation_ids(parse_chat(body, Limits()))
        elif request.prompt is None:
            raise InvalidRequest("prompt or messages is needed", param="prompt")
        else:
            ids = self._tokenizer.encode(request.prompt, add_bos=request.add_special_tokens is not False)
        strings = [self._tokenizer.text_of(i) for i in ids] if request.return_token_strs else None
        return request.model, {
            "count": len(ids),
            "max_model_len": max_model_len,
            "tokens": ids,
            "token_strs": strings,
        }

    def detokenize(self, body: bytes) -> tuple[str | None, dict[str, Any]]:
        """The model that the request names, and the answer. Raises InvalidRequest."""
        request = validated(parse_body(body), _Detokenize)
        if not all(0 <= token < self._facts.vocab_size for token in request.tokens):
            raise InvalidRequest(f"token ids are from 0 to {self._facts.vocab_size - 1}", param="tokens")
        return request.model, {"prompt": self._tokenizer.decode(request.tokens, skip_special=False)}

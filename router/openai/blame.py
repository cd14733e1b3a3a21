"""A worker's complaint about a request, turned into one about what the client sent.

Workers know a request as shared.wire has it, and name its fields; the client knows its own.
"""

from __future__ import annotations

from router.openai.requests import ChatRequest, CompletionRequest
from shared.errors import InvalidRequest


def in_client_words(
    request: CompletionRequest | ChatRequest, form_field: str | None, error: InvalidRequest
) -> InvalidRequest:
    """`error` with the client's own field, or with none where it has no such field.

    form_field: the one that the answer's grammar came from, as in Plan.
    """
    message, param = error.message, None
    if error.param == "sampling.grammar" and form_field is not None:
        message, param = message.replace("the grammar", form_field, 1), form_field
    elif error.param == "token_ids":
        param = "messages" if isinstance(request, ChatRequest) else "prompt"
    elif error.param == "max_tokens":
        param = _length(request) or _choices(request)
    elif error.param == "n":
        param = _choices(request)
    told = type(error)(message, param=param)
    return request.in_own_words(told) if isinstance(request, ChatRequest) else told


def _length(request: CompletionRequest | ChatRequest) -> str | None:
    """Of two limits the smaller one."""
    asked = request.asked_tokens
    if asked is None:
        return None
    return "max_tokens" if request.max_tokens == asked else "max_completion_tokens"


def _choices(request: CompletionRequest | ChatRequest) -> str | None:
    """What made it more than one answer."""
    if isinstance(request, CompletionRequest) and request.best_of is not None:
        return "best_of"
    return "n" if request.n > 1 else None

"""Bodies of /v1/completions and /v1/chat/completions: JSON bytes in, checked requests out.

null equals missing, numbers and booleans are not guessed from text, unknown fields are ignored. What is refused,
and why, stands in router.openai.fields; limits that need the model or token counts are checked in resolve.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, Field, PlainValidator, ValidationInfo

from router.openai.body import parse_body
from router.openai.fields import CHAT_FIELDS, COMPLETION_FIELDS
from router.openai.messages import parse_messages
from router.openai.prompts import Prompt, parse_prompts
from router.openai.shared_fields import Limits, SharedFields, limits_of, refuse, validate, within_choices
from router.openai.tools import AUTO, Tool, ToolChoice, callable_tools, parse_tool_choice, parse_tools
from router.text.template import Message
from shared.errors import InvalidRequest

MAX_LOGPROBS = 20
_RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
)


def _prompts(value: Any, info: ValidationInfo) -> list[Prompt]:
    return parse_prompts(value, limits_of(info).max_prompts)


class CompletionRequest(SharedFields):
    """POST /v1/completions."""

    prompt: Annotated[list[Prompt], PlainValidator(_prompts)] = Field(
        default_factory=list, validate_default=True
    )
    max_tokens: int | None = Field(default=None, ge=0)
    best_of: Annotated[int, BeforeValidator(within_choices)] | None = Field(default=None, ge=1)
    echo: bool = False
    suffix: str = ""
    add_special_tokens: bool = True
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @property
    def num_logprobs(self) -> int | None:
        """As given: 0 is the chosen token's only."""
        return self.logprobs

    @property
    def num_samples(self) -> int:
        """Answers to draw for each prompt; the n best of them are shown."""
        return self.best_of or self.n


class ChatRequest(SharedFields):
    """POST /v1/chat/completions."""

    messages: Annotated[list[Message], PlainValidator(parse_messages)] = Field(
        default_factory=list, validate_default=True
    )
    logprobs: bool = False
    top_logprobs: int = Field(default=0, ge=0, le=MAX_LOGPROBS)
    tools: Annotated[list[Tool], PlainValidator(parse_tools)] = Field(default_factory=list)
    tool_choice: Annotated[ToolChoice, PlainValidator(parse_tool_choice)] = AUTO
    parallel_tool_calls: bool = True
    add_generation_prompt: bool | None = None
    continue_final_message: bool = False
    chat_template_kwargs: dict[str, Any] = Field(default_factory=dict)
    add_special_tokens: bool = False

    def in_own_words(self, error: InvalidRequest) -> InvalidRequest:
        """`error` about this request, as the endpoint that it came from names things."""
        return error

    @property
    def has_form(self) -> bool:
        """Tools have grammars too."""
        return bool(self.tools) or self.constraint is not None

    @property
    def num_logprobs(self) -> int | None:
        """Only if asked for at all."""
        return self.top_logprobs if self.logprobs else None


def parse_completion(body: bytes, limits: Limits) -> CompletionRequest:
    """Raises InvalidRequest, which names the field at fault."""
    request = validate(CompletionRequest, parse_body(body), COMPLETION_FIELDS, limits)
    if request.best_of is not None and request.best_of < request.n:
        refuse("best_of", "must not be smaller than n")
    if request.num_samples > request.n and request.stream:
        refuse("best_of", "larger than n cannot be streamed, since the best are only known at the end")
    if len(request.prompt) * request.num_samples > limits.max_total_choices:
        refuse("n", f"times the number of prompts must be at most {limits.max_total_choices}")
    if request.suffix and request.echo:
        refuse("suffix", "and echo exclude each other")
    return request


def parse_chat(body: bytes, limits: Limits) -> ChatRequest:
    """Raises InvalidRequest, which names the field at fault."""
    request = validate(ChatRequest, parse_body(body), CHAT_FIELDS, limits)
    check_chat(request)
    return request


def check_chat(request: ChatRequest) -> None:
    """What no field can tell alone. Raises InvalidRequest, which names the field at fault."""
    if request.top_logprobs and not request.logprobs:
        refuse("top_logprobs", "needs logprobs to be true")
    reserved = _RESERVED_VARIABLES & request.chat_template_kwargs.keys()
    if reserved:
        refuse("chat_template_kwargs", f"must not hold {min(reserved)}")
    callable_tools(request.tools, request.tool_choice)
    if request.continue_final_message:
        last = request.messages[-1]
        if request.add_generation_prompt:
            refuse("continue_final_message", "and add_generation_prompt exclude each other")
        if last["role"] != "assistant" or last["content"] is None or last.get("tool_calls"):
            refuse("continue_final_message", "needs a last message of the assistant, with text and no calls")

"""Bodies of /v1/completions and /v1/chat/completions: JSON bytes in, checked requests out.

null equals missing, numbers and booleans are not guessed from text, unknown fields are ignored. What is refused,
and why, stands in router.openai.fields; limits that need the model or token counts are checked in resolve.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn, TypeVar

import orjson
from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
)

from router.openai.fields import CHAT_FIELDS, COMPLETION_FIELDS, check_refused, unknown_fields
from router.openai.fields import Field as KnownField
from router.openai.messages import parse_messages
from router.openai.prompts import Prompt, parse_prompts
from router.openai.structured import (
    Constraint,
    parse_choice,
    parse_grammar,
    parse_json,
    parse_regex,
    parse_response_format,
    parse_structured_outputs,
)
from router.openai.tools import AUTO, Tool, ToolChoice, callable_tools, parse_tool_choice, parse_tools
from router.text.template import Message
from shared.errors import InvalidRequest

MAX_LOGPROBS = 20
MAX_BIASES = 1024
_RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message", "chat_template"}
)


@dataclass(frozen=True, slots=True)
class Limits:
    """How much one request may ask for."""

    max_choices: int = 128
    max_prompts: int = 128
    max_total_choices: int = 1024


def _stop(value: Any) -> Any:
    """One text or several; empty ones never match anything and are dropped."""
    texts = [value] if isinstance(value, str) else value
    return [text for text in texts if text != ""] if isinstance(texts, list) else value


def _biases(value: Any) -> Any:
    """JSON keys are text; here they are token ids."""
    if not isinstance(value, Mapping):
        return value
    try:
        return {int(key): bias for key, bias in value.items()}
    except ValueError as exc:
        raise ValueError("keys must be token ids") from exc


def _within_choices(value: Any, info: ValidationInfo) -> Any:
    limit = _limits(info).max_choices
    if isinstance(value, int) and value > limit:
        raise ValueError(f"must be at most {limit}")
    return value


def _prompts(value: Any, info: ValidationInfo) -> list[Prompt]:
    return parse_prompts(value, _limits(info).max_prompts)


def _guided(parse: Callable[[Any, str], Constraint], name: str) -> PlainValidator:
    return PlainValidator(lambda value: parse(value, name))


def _limits(info: ValidationInfo) -> Limits:
    return info.context if isinstance(info.context, Limits) else Limits()


class StreamOptions(BaseModel):
    """What a stream says beyond its text."""

    model_config = ConfigDict(strict=True, frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class _Request(BaseModel):
    """Fields of both endpoints. None means that the client left it to the server."""

    model_config = ConfigDict(strict=True, frozen=True)

    model: str | None = None
    n: Annotated[int, BeforeValidator(_within_choices)] = Field(default=1, ge=1)
    max_tokens: int | None = Field(default=None, ge=1)
    max_completion_tokens: int | None = Field(default=None, ge=1)
    min_tokens: int = Field(default=0, ge=0)
    temperature: float | None = Field(default=None, ge=0, le=2)
    top_p: float | None = Field(default=None, ge=0, le=1)
    top_k: int | None = Field(default=None, ge=-1)
    min_p: float = Field(default=0.0, ge=0, le=1)
    repetition_penalty: float | None = Field(default=None, gt=0, le=100)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2)
    logit_bias: Annotated[dict[int, Annotated[float, Field(ge=-100, le=100)]], BeforeValidator(_biases)] = (
        Field(default_factory=dict, max_length=MAX_BIASES)
    )
    seed: int | None = Field(default=None, ge=-(2**63), lt=2**64)
    stop: Annotated[list[str], BeforeValidator(_stop)] = Field(default_factory=list)
    stop_token_ids: list[int] = Field(default_factory=list)
    ignore_eos: bool = False
    include_stop_str_in_output: bool = False
    return_token_ids: bool = False
    truncate_prompt_tokens: Annotated[int, Field(ge=-1)] | None = None
    stream: bool = False
    stream_options: StreamOptions | None = None
    response_format: Annotated[Constraint | None, PlainValidator(parse_response_format)] = None
    structured_outputs: Annotated[Constraint | None, PlainValidator(parse_structured_outputs)] = None
    guided_json: Annotated[Constraint | None, _guided(parse_json, "guided_json")] = None
    guided_regex: Annotated[Constraint | None, _guided(parse_regex, "guided_regex")] = None
    guided_choice: Annotated[Constraint | None, _guided(parse_choice, "guided_choice")] = None
    guided_grammar: Annotated[Constraint | None, _guided(parse_grammar, "guided_grammar")] = None
    unknown: tuple[str, ...] = Field(default=(), exclude=True)

    @property
    def asked_tokens(self) -> int | None:
        """The answer's length that the client asked for; the smaller if it named two."""
        named = [limit for limit in (self.max_tokens, self.max_completion_tokens) if limit is not None]
        return min(named, default=None)

    @property
    def constraints(self) -> list[Constraint]:
        """Everything that was asked of the answer's form."""
        asked = (self.response_format, self.structured_outputs, self.guided_json, self.guided_regex)
        return [c for c in (*asked, self.guided_choice, self.guided_grammar) if c is not None]

    @property
    def constraint(self) -> Constraint | None:
        """The one thing that was asked of the answer's form."""
        return next(iter(self.constraints), None)

    @property
    def has_form(self) -> bool:
        """Is there a grammar to be checked? That takes time."""
        return self.constraint is not None

    @property
    def num_logprobs(self) -> int | None:
        """None for no logprobs, else how many of the best beside the chosen one."""
        raise NotImplementedError


class CompletionRequest(_Request):
    """POST /v1/completions."""

    prompt: Annotated[list[Prompt], PlainValidator(_prompts)] = Field(
        default_factory=list, validate_default=True
    )
    max_tokens: int | None = Field(default=None, ge=0)
    best_of: Annotated[int, BeforeValidator(_within_choices)] | None = Field(default=None, ge=1)
    echo: bool = False
    suffix: str = ""
    logprobs: int | None = Field(default=None, ge=0, le=MAX_LOGPROBS)

    @property
    def num_logprobs(self) -> int | None:
        """As given: 0 is the chosen token's only."""
        return self.logprobs

    @property
    def num_samples(self) -> int:
        """Answers to draw for each prompt; the n best of them are shown."""
        return self.best_of or self.n


class ChatRequest(_Request):
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

    @property
    def has_form(self) -> bool:
        """Tools have grammars too."""
        return bool(self.tools) or self.constraint is not None

    @property
    def num_logprobs(self) -> int | None:
        """Only if asked for at all."""
        return self.top_logprobs if self.logprobs else None


R = TypeVar("R", bound=_Request)


def parse_completion(body: bytes, limits: Limits) -> CompletionRequest:
    """Raises InvalidRequest, which names the field at fault."""
    request = _parse(CompletionRequest, body, COMPLETION_FIELDS, limits)
    if request.best_of is not None and request.best_of < request.n:
        _refuse("best_of", "must not be smaller than n")
    if request.num_samples > request.n and request.stream:
        _refuse("best_of", "larger than n cannot be streamed, since the best are only known at the end")
    if len(request.prompt) * request.num_samples > limits.max_total_choices:
        _refuse("n", f"times the number of prompts must be at most {limits.max_total_choices}")
    if request.suffix and request.echo:
        _refuse("suffix", "and echo exclude each other")
    return request


def parse_chat(body: bytes, limits: Limits) -> ChatRequest:
    """Raises InvalidRequest, which names the field at fault."""
    request = _parse(ChatRequest, body, CHAT_FIELDS, limits)
    check_chat(request)
    return request


def check_chat(request: ChatRequest) -> None:
    """What no field can tell alone. Raises InvalidRequest, which names the field at fault."""
    if request.top_logprobs and not request.logprobs:
        _refuse("top_logprobs", "needs logprobs to be true")
    reserved = _RESERVED_VARIABLES & request.chat_template_kwargs.keys()
    if reserved:
        _refuse("chat_template_kwargs", f"must not hold {min(reserved)}")
    callable_tools(request.tools, request.tool_choice)
    if request.continue_final_message:
        last = request.messages[-1]
        if request.add_generation_prompt:
            _refuse("continue_final_message", "and add_generation_prompt exclude each other")
        if last["role"] != "assistant" or last["content"] is None or last.get("tool_calls"):
            _refuse("continue_final_message", "needs a last message of the assistant, with text and no calls")


@contextmanager
def refuse_deep() -> Iterator[None]:
    """What Python cannot walk through is refused: within are parsing a request and all work on its values."""
    try:
        yield
    except RecursionError as exc:
        raise InvalidRequest("the body is nested too deeply") from exc


def parse_body(body: bytes) -> dict[str, Any]:
    """A JSON object. Raises InvalidRequest."""
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError as exc:
        raise InvalidRequest(f"the body is not valid JSON: {exc.msg}") from exc
    if not isinstance(content, dict):
        raise InvalidRequest("the body must be a JSON object")
    return content


def _parse(cls: type[R], body: bytes, table: tuple[KnownField, ...], limits: Limits) -> R:
    return validate(cls, parse_body(body), table, limits)


def validate(cls: type[R], content: dict[str, Any], table: tuple[KnownField, ...], limits: Limits) -> R:
    """Raises InvalidRequest, which names the field at fault."""
    check_refused(content, table)
    given = {name: value for name, value in content.items() if value is not None}
    try:
        request = cls.model_validate(given | {"unknown": unknown_fields(content, table)}, context=limits)
    except ValidationError as exc:
        raise _told(exc) from exc
    if len(request.constraints) > 1:
        first, second = request.constraints[:2]
        _refuse(second.param, f"and {first.param} exclude each other")
    if request.stream_options is not None and not request.stream:
        _refuse("stream_options", "is only allowed with stream")
    asked = request.asked_tokens
    if asked is not None and request.min_tokens > asked:
        _refuse("min_tokens", f"is larger than max_tokens, which is {asked}")
    return request


def _told(error: ValidationError) -> InvalidRequest:
    """The first complaint in plain words; never the value, which may be long."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    param = place.lstrip(".").removesuffix(".[key]")
    reason = re.sub(r"^(Value error, |Input |List |Dictionary )", "", first["msg"])
    return InvalidRequest(f"{param} {reason}", param=param or None)


def _refuse(param: str, why: str) -> NoReturn:
    raise InvalidRequest(f"{param} {why}", param=param)

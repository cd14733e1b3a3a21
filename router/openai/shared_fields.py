"""What the requests of both endpoints share: fields, limits, and how a JSON object becomes a checked request."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, NoReturn, TypeVar

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
    ValidationInfo,
)

from router.openai.fields import Field as KnownField
from router.openai.fields import check_refused, unknown_fields
from router.openai.structured import (
    Constraint,
    parse_choice,
    parse_grammar,
    parse_json,
    parse_regex,
    parse_response_format,
    parse_structured_outputs,
)
from shared.errors import InvalidRequest

MAX_BIASES = 1024
_TOKEN_ID = re.compile(r"0|[1-9][0-9]{0,18}")
_MAY_BE_EMPTY = frozenset(
    {
        *(
            "model",
            "stop",
            "stop_token_ids",
            "logit_bias",
            "stream_options",
            "suffix",
            "chat_template_kwargs",
        ),
        *("tools", "tool_choice", "response_format", "structured_outputs"),
        *("guided_json", "guided_regex", "guided_choice", "guided_grammar"),
    }
)
"""Fields that are lists, texts or objects and need not be there: empty, they ask for nothing."""


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
    """JSON keys are text; here they are token ids, each written in the one way that JSON writes a number.

    Another spelling of the same id would be a second entry for it, and one of the two be dropped.
    """
    if not isinstance(value, Mapping):
        return value
    if not all(_TOKEN_ID.fullmatch(key) for key in value):
        raise ValueError("keys must be token ids, in decimal digits")
    return {int(key): bias for key, bias in value.items()}


def within_choices(value: Any, info: ValidationInfo) -> Any:
    """Not more choices than the limits allow."""
    limit = limits_of(info).max_choices
    if isinstance(value, int) and value > limit:
        raise ValueError(f"must be at most {limit}")
    return value


def _guided(parse: Callable[[Any, str], Constraint], name: str) -> PlainValidator:
    return PlainValidator(lambda value: parse(value, name))


def limits_of(info: ValidationInfo) -> Limits:
    """The limits that a request is validated under."""
    return info.context if isinstance(info.context, Limits) else Limits()


class StreamOptions(BaseModel):
    """What a stream says beyond its text."""

    model_config = ConfigDict(strict=True, frozen=True)

    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SharedFields(BaseModel):
    """Fields of both endpoints. None means that the client left it to the server."""

    model_config = ConfigDict(strict=True, frozen=True)

    model: str | None = None
    n: Annotated[int, BeforeValidator(within_choices)] = Field(default=1, ge=1)
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
    return_tokens_as_token_ids: bool = False
    skip_special_tokens: bool = True
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


R = TypeVar("R", bound=SharedFields)


def validate(cls: type[R], content: dict[str, Any], table: tuple[KnownField, ...], limits: Limits) -> R:
    """Raises InvalidRequest, which names the field at fault."""
    check_refused(content, table)
    given = {name: value for name, value in content.items() if not _asks_for_nothing(name, value)}
    try:
        request = cls.model_validate(given | {"unknown": unknown_fields(content, table)}, context=limits)
    except ValidationError as exc:
        raise _told(exc) from exc
    if len(request.constraints) > 1:
        first, second = request.constraints[:2]
        refuse(second.param, f"and {first.param} exclude each other")
    if request.stream_options is not None and not request.stream:
        refuse("stream_options", "is only allowed with stream")
    asked = request.asked_tokens
    if asked is not None and request.min_tokens > asked:
        refuse("min_tokens", f"is larger than max_tokens, which is {asked}")
    return request


def _asks_for_nothing(name: str, value: Any) -> bool:
    if name == "guided_json" and value == {}:
        return False  # a schema, of whatever is JSON
    return value is None or (value in ("", [], {}) and name in _MAY_BE_EMPTY)


def _told(error: ValidationError) -> InvalidRequest:
    """The first complaint in plain words; never the value, which may be long."""
    first = error.errors(include_url=False, include_input=False, include_context=False)[0]
    place = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
    param = place.lstrip(".").removesuffix(".[key]")
    reason = re.sub(r"^(Value error, |Input |List |Dictionary )", "", first["msg"])
    return InvalidRequest(f"{param} {reason}", param=param or None)


def refuse(param: str, why: str) -> NoReturn:
    """Raise InvalidRequest for a field, in a sentence that begins with its name."""
    raise InvalidRequest(f"{param} {why}", param=param)

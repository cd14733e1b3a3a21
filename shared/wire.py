"""Bodies of every internal HTTP boundary: router <-> workers, prefill -> decode. One protocol version.

Streams are NDJSON: one event object per line, exactly one of its fields set. A stream that ends without
`finish`, `done` or `error` was cut and counts as BackendError, never as success.
Durations are float seconds measured on the sender's own monotonic clock; no timestamp ever crosses a boundary.
docs/protocol.md tells the story; this file is the law.
"""

from __future__ import annotations

import hashlib
from typing import Annotated, Literal

import orjson
from pydantic import BaseModel, ConfigDict, Field, model_validator

PROTOCOL_VERSION = 2
MAX_GRAMMAR_CHARS = 1 << 18
MAX_TIMEOUT_S = 86_400.0

TokenId = Annotated[int, Field(ge=0, lt=2**31)]
Seconds = Annotated[float, Field(ge=0, allow_inf_nan=False)]
Count = Annotated[int, Field(ge=0)]
FinishReason = Literal["stop", "length"]
Role = Literal["prefill", "decode"]


class Wire(BaseModel):
    """Frozen; an unknown field is an error, so that a version skew is seen at once."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    def to_json(self) -> bytes:
        """One line without its end, absent fields left out."""
        return self.model_dump_json(exclude_none=True).encode()


class Grammar(Wire):
    """What every answer must follow; each worker compiles it for itself.

    text: a JSON schema, a regular expression (Rust's, of the whole answer) or a Lark grammar (llguidance's).
    """

    kind: Literal["json_schema", "regex", "lark"]
    text: str = Field(min_length=1, max_length=MAX_GRAMMAR_CHARS)


class Sampling(Wire):
    """How tokens are drawn. Every field is already resolved: no field means "the server's default".

    temperature 0 is greedy whatever else is set; top_k 0 and top_p 1 and min_p 0 are off.
    seed: drawn by the router when the client gave none, so that a retry draws the same tokens.
    max_tokens: per choice, counted from the end of the prompt; 0 only reads the prompt, and samples nothing.
    num_logprobs: None for none; 0 for the chosen token's only; k for the k best as well.
    num_prompt_logprobs: the same for the prompt's own tokens, told by whoever computes a prompt that nothing was
        generated for yet. Its KV is computed afresh then, not taken from a prefix cache.
    grammar: end tokens come only where it may end; where it can only end, they come whatever else is set.
    """

    temperature: float = Field(default=1.0, ge=0, le=100, allow_inf_nan=False)
    top_p: float = Field(default=1.0, ge=0, le=1, allow_inf_nan=False)
    top_k: int = Field(default=0, ge=0)
    min_p: float = Field(default=0.0, ge=0, le=1, allow_inf_nan=False)
    repetition_penalty: float = Field(default=1.0, gt=0, le=100, allow_inf_nan=False)
    presence_penalty: float = Field(default=0.0, ge=-2, le=2, allow_inf_nan=False)
    frequency_penalty: float = Field(default=0.0, ge=-2, le=2, allow_inf_nan=False)
    logit_bias: dict[TokenId, float] = Field(default_factory=dict, max_length=1024)
    seed: int = Field(default=0, ge=0, lt=2**64)
    max_tokens: int = Field(ge=0)
    min_tokens: int = Field(default=0, ge=0)
    stop_token_ids: tuple[TokenId, ...] = Field(default=(), max_length=256)
    ignore_eos: bool = False
    num_logprobs: int | None = Field(default=None, ge=0, le=20)
    num_prompt_logprobs: int | None = Field(default=None, ge=0, le=20)
    grammar: Grammar | None = None


class Work(Wire):
    """What prefill and decode are both told about a request.

    token_ids: the prompt, then what was already generated (only after a worker was lost).
    num_prompt_tokens: length of the prompt within token_ids; sampling positions and penalties count from it.
    first_choice: choices are [first_choice, first_choice + num_choices); their index keys the random draw.
    timeout_s: what is left of the request's deadline when this was sent.
    """

    protocol: Literal[1] = 1
    request_id: str = Field(min_length=1, max_length=128, pattern=r"^[A-Za-z0-9._-]+$")
    token_ids: list[TokenId] = Field(min_length=1)
    num_prompt_tokens: int = Field(ge=1)
    num_choices: int = Field(default=1, ge=1, le=128)
    first_choice: int = Field(default=0, ge=0, le=128)
    sampling: Sampling
    timeout_s: float = Field(gt=0, le=MAX_TIMEOUT_S)

    @model_validator(mode="after")
    def _lengths_fit(self) -> Work:
        generated = len(self.token_ids) - self.num_prompt_tokens
        if generated < 0:
            raise ValueError("num_prompt_tokens is larger than the number of token_ids")
        if generated and generated >= self.sampling.max_tokens:
            raise ValueError("token_ids already hold max_tokens generated tokens")
        return self

    @property
    def max_new_tokens(self) -> int:
        """Tokens that each choice may still get."""
        return self.sampling.max_tokens - (len(self.token_ids) - self.num_prompt_tokens)


class Handoff(Wire):
    """Decode's grant: where KV for one request goes, and the right to send it there.

    handoff_id, epoch: name this reservation; a later one never has the same pair.
    have_tokens: leading tokens whose KV decode already holds; only [have_tokens, len(token_ids)) travels.
    kv_wire: quantised KV (shared.kv.shape.WireFormat) that decode takes as well as exact KV.
    """

    handoff_id: str
    epoch: int
    kv_url: str
    ticket: str
    have_tokens: Count
    transports: tuple[str, ...] = ("tcp",)
    kv_wire: str | None = None


class DecodeRequest(Work):
    """POST /v1/decode. `handoff`: KV will arrive; `local`: compute the prompt here (unified mode)."""

    mode: Literal["handoff", "local"] = "handoff"


class PrefillRequest(Work):
    """POST /v1/prefill. Without a hand-off the first token is all that is wanted (max_tokens 1).

    With max_tokens 0 there is no first token, so nothing that decode could go on from.
    """

    handoff: Handoff | None = None

    @model_validator(mode="after")
    def _has_a_first_token(self) -> PrefillRequest:
        if self.handoff is not None and not self.sampling.max_tokens:
            raise ValueError("a hand-off needs max_tokens of at least 1")
        return self


class StopChoices(Wire):
    """POST /v1/decode/stop: the router found a stop string; these choices need no more tokens."""

    request_id: str
    choices: list[int] = Field(min_length=1, max_length=128)


class Logprobs(Wire):
    """Natural logarithms, after penalties and bias, before temperature. top: best first."""

    token: float
    top: list[tuple[TokenId, float]] = Field(default_factory=list)


class TokenOut(Wire):
    """One sampled token. finish_reason "stop" means: this is the end token itself, it has no text."""

    choice: Count
    token_id: TokenId
    logprobs: Logprobs | None = None
    finish_reason: FinishReason | None = None


class First(Wire):
    """The first token of every choice, and what the prompt cost. computed + cached = len(token_ids).

    No tokens at all if max_tokens is 0.
    """

    tokens: list[TokenOut]
    cached_tokens: Count
    computed_tokens: Count
    queue_s: Seconds
    prefill_s: Seconds


class Sent(Wire):
    """KV is verified and injected at decode.

    kv_bytes: tensor bytes of K and V; wire_bytes: the whole blob, header included, fewer if it was quantised.
    kv_wire: how it was, if it was.
    transfer_s: first token sampled -> decode's answer (the exposed part).
    hidden_s: time spent sending before the first token was sampled.
    """

    transport: str
    kv_bytes: Count
    wire_bytes: Count
    transfer_s: Seconds
    hidden_s: Seconds
    kv_wire: str | None = None


class Finish(Wire):
    """The end of a decode stream. In local mode nothing was received and the prompt was computed here."""

    kv_bytes_received: Count
    prompt_tokens_computed: Count
    output_tokens: Count
    decode_queue_s: Seconds
    decode_s: Seconds


class ErrorBody(Wire):
    """A ServingError on the wire; `code` finds its class in shared.errors.error_table()."""

    code: str
    message: str
    param: str | None = None
    retry_after_s: float | None = None


class DecodeEvent(Wire):
    """One line of /v1/decode: reserved | first (local mode) ... tokens per step ... finish | error.

    prompt_logprobs: as in PrefillEvent, in local mode.
    """

    reserved: Handoff | None = None
    prompt_logprobs: list[Logprobs] | None = None
    first: First | None = None
    tokens: list[TokenOut] | None = None
    finish: Finish | None = None
    error: ErrorBody | None = None


class PrefillEvent(Wire):
    """One line of /v1/prefill: first, then sent (if KV was wanted), then done | error.

    prompt_logprobs: before `first`, if wanted, in as many lines as it takes: those of positions 1, 2, ... of the
        prompt, raw (no penalty, no bias). Position 0 has none.
    """

    prompt_logprobs: list[Logprobs] | None = None
    first: First | None = None
    sent: Sent | None = None
    done: bool | None = None
    error: ErrorBody | None = None


class Fingerprint(Wire):
    """What two workers must agree on before KV of one means anything to the other.

    weights, config, tokenizer: hex digests of content, not names. Block size is absent on purpose: it may differ.
    """

    weights: str
    config: str
    tokenizer: str
    dtype: str
    layout: str
    rope: str
    num_layers: int
    num_kv_heads: int
    head_dim: int

    def differences(self, other: Fingerprint) -> list[str]:
        """Names of the fields that differ, in declaration order; empty means compatible."""
        return [name for name in type(self).model_fields if getattr(self, name) != getattr(other, name)]

    @property
    def digest(self) -> str:
        """32 hex digits that stand for the whole fingerprint."""
        content = orjson.dumps(self.model_dump(), option=orjson.OPT_SORT_KEYS)
        return hashlib.blake2b(content, digest_size=16).hexdigest()


class WorkerInfo(Wire):
    """GET /v1/info of a worker: who it is, whether it takes work, and how much it holds.

    boot: new at every start, so that a restart is seen. load: requests accepted and not ended.
    """

    protocol: int
    role: Role
    name: str
    boot: str
    model: str
    fingerprint: Fingerprint
    max_model_len: int
    num_blocks: int
    block_size: int
    ready: bool
    draining: bool
    load: int

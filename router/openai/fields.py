"""Every request field that is known here, and what becomes of it: one table per endpoint, read by the parser.

supported: works. ignored: accepted, cannot change an answer. refused: would change the answer and does not work
here, so a request that asks for it is a 400 that names the field; values that ask for nothing are accepted.
A field in neither table is unknown: it is ignored and reported to the log.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from shared.errors import InvalidRequest

Status = Literal["supported", "ignored", "refused"]


@dataclass(frozen=True, slots=True)
class Field:
    """neutral: values of a refused field that ask for nothing, besides null, "", [] and {}."""

    name: str
    status: Status
    note: str = ""
    neutral: tuple[Any, ...] = ()


def _refused(name: str, *neutral: Any, note: str = "") -> Field:
    return Field(name, "refused", note, neutral)


PASSED_ON = (
    *("temperature", "top_p", "top_k", "min_p", "min_tokens", "repetition_penalty", "presence_penalty"),
    *("frequency_penalty", "logit_bias", "seed", "stop", "stop_token_ids", "ignore_eos", "stream"),
    *("include_stop_str_in_output", "truncate_prompt_tokens", "skip_special_tokens", "top_logprobs"),
)
"""Fields that /v1/responses has from chat as they are."""

_SHARED = (
    Field("model", "supported", "missing means the served model"),
    Field("n", "supported", "choices per prompt"),
    Field("max_tokens", "supported", "above the room that is left: 400; 0 only on completions"),
    Field("max_completion_tokens", "supported", "the smaller wins if max_tokens is given too"),
    Field("min_tokens", "supported", "neither end tokens nor stop strings end the answer before"),
    Field("temperature", "supported", "0 to 2; 0 is greedy whatever else is set"),
    Field("top_p", "supported", "0 to 1"),
    Field("top_k", "supported", "0 and -1 are off"),
    Field("min_p", "supported", "0 to 1"),
    Field("repetition_penalty", "supported", "above 0; counts prompt and answer; 1 is off"),
    Field("presence_penalty", "supported", "-2 to 2; counts the answer only"),
    Field("frequency_penalty", "supported", "-2 to 2; counts the answer only"),
    Field("logit_bias", "supported", "token id -> -100 to 100"),
    Field("seed", "supported", "64 bits; a negative seed stands for itself plus 2**64"),
    Field("stop", "supported", "text, or a list of any length within the limits; empty strings are ignored"),
    Field("stop_token_ids", "supported", "ids below the model's vocabulary size"),
    Field("ignore_eos", "supported"),
    Field("logprobs", "supported"),
    Field(
        "return_token_ids", "supported", "adds token_ids to every choice, prompt_token_ids to whole answers"
    ),
    Field("stream", "supported"),
    Field("stream_options", "supported", "include_usage, continuous_usage_stats; only with stream"),
    Field("user", "ignored"),
    Field("metadata", "ignored"),
    Field("store", "ignored", "nothing is stored"),
    Field("service_tier", "ignored"),
    Field("safety_identifier", "ignored"),
    Field("prompt_cache_key", "ignored", "the prefix cache needs no key"),
    Field("prompt_cache_options", "ignored", "the prefix cache needs no options"),
    Field("prompt_cache_retention", "ignored", "the prefix cache keeps what fits"),
    Field("request_id", "ignored", "ids are made here"),
    Field("spaces_between_special_tokens", "ignored", "byte-level tokenizers have none"),
    Field("include_stop_str_in_output", "supported", "of stop strings; an end token has no text"),
    Field("truncate_prompt_tokens", "supported", "keeps the last ones; -1: what leaves room for the answer"),
    Field("priority", "ignored", "requests are served first come, first served"),
    _refused("prompt_logprobs", False, note="use echo with logprobs"),
    Field("skip_special_tokens", "supported", "false: special tokens are text, the end token aside"),
    Field("return_tokens_as_token_ids", "supported", "tokens of logprobs are named token_id:N"),
    _refused("allowed_token_ids"),
    _refused("bad_words"),
    Field("guided_json", "supported", "a JSON schema, as an object or as text; {} is any JSON"),
    Field("guided_regex", "supported", "Rust's syntax, matched by the whole answer"),
    Field("guided_choice", "supported", "a list of texts"),
    Field("guided_grammar", "supported", "Lark or GBNF"),
    Field("structured_outputs", "supported", "exactly one of json, json_object, regex, choice, grammar"),
    Field("response_format", "supported", "text, json_object or json_schema, which is enforced"),
    Field("guided_decoding_backend", "ignored", "there is one"),
    _refused("guided_whitespace_pattern", note="white space is bounded by the server"),
    _refused("structural_tag"),
    _refused("use_beam_search", False),
    _refused("length_penalty", 1),
    _refused("early_stopping", False),
    _refused("logits_processors"),
    _refused("cache_salt"),
    _refused("kv_transfer_params"),
)

COMPLETION_FIELDS = (
    *_SHARED,
    Field("prompt", "supported", "text, list of texts, token ids, or list of token id lists"),
    Field("best_of", "supported", "draws so many, shows the n with the best mean logprob; not with stream"),
    Field("echo", "supported", "with logprobs: also the prompt's; with max_tokens 0: nothing is generated"),
    Field("suffix", "supported", "only where the tokenizer has Qwen2.5-Coder's fill-in-the-middle tokens"),
    Field("add_special_tokens", "supported", "false: no BOS token, where the tokenizer adds one to text"),
)

CHAT_FIELDS = (
    *_SHARED,
    Field("messages", "supported"),
    Field("top_logprobs", "supported", "0 to 20; only with logprobs"),
    Field("add_generation_prompt", "supported"),
    Field("continue_final_message", "supported", "the last message must be the assistant's"),
    Field("chat_template_kwargs", "supported", "further variables for the template"),
    Field("tools", "supported", "functions; their arguments follow their parameters' schema"),
    Field("tool_choice", "supported", "none, auto, required, a function, or allowed_tools; enforced"),
    Field("parallel_tool_calls", "supported", "false: at most one call"),
    Field("prediction", "ignored", "a hint about speed"),
    _refused("echo", False),
    _refused("suffix"),
    Field("moderation", "ignored"),
    _refused("best_of", 1),
    _refused("functions"),
    _refused("function_call", "none", "auto"),
    _refused("modalities", ["text"]),
    _refused("audio"),
    _refused("reasoning_effort", "none"),
    _refused("verbosity", "medium"),
    _refused("web_search_options"),
    _refused("chat_template", note="the checkpoint's own template is used"),
    _refused("documents"),
    Field("add_special_tokens", "supported", "true: a BOS token before the template's text, if there is one"),
)

RESPONSE_FIELDS = (
    Field("model", "supported", "missing means the served model"),
    Field("input", "supported", "text, or a list of messages, function calls and their outputs"),
    Field("instructions", "supported", "a system message before the input"),
    Field("max_output_tokens", "supported", "above the room that is left: 400"),
    *(field for field in _SHARED if field.name in PASSED_ON),
    Field("text", "supported", "format and its limits as response_format of chat; verbosity only medium"),
    Field("chat_template_kwargs", "supported", "further variables for the template"),
    Field("include", "supported", "message.output_text.logprobs; nothing else exists that could be included"),
    Field("top_logprobs", "supported", "0 to 20; above 0 it asks for logprobs by itself"),
    Field("reasoning", "ignored", "this model has none that can be set"),
    Field("tools", "supported", "functions only"),
    Field("tool_choice", "supported", "none, auto, required, a function, or allowed_tools"),
    Field("parallel_tool_calls", "supported"),
    Field("max_tool_calls", "ignored", "built-in tools do not exist"),
    Field("stream_options", "ignored", "obfuscation is never added"),
    *(field for field in _SHARED if field.name in ("user", "metadata", "store", "service_tier")),
    *(field for field in _SHARED if field.name.startswith(("safety_", "prompt_cache_"))),
    Field("moderation", "ignored"),
    Field("access_programs", "ignored"),
    _refused("previous_response_id", note="nothing is stored; send the whole conversation as input"),
    _refused("conversation", note="nothing is stored; send the whole conversation as input"),
    _refused("prompt", note="there are no stored prompts"),
    _refused("background", False),
    _refused("background_options"),
    _refused("context_management"),
    _refused("truncation", "disabled"),
    _refused("image"),
)


def markdown(table: tuple[Field, ...]) -> str:
    """The table for people, in the order: supported, ignored, refused."""
    lines = ["| field | | |", "|---|---|---|"]
    for status in ("supported", "ignored", "refused"):
        for field in sorted((f for f in table if f.status == status), key=lambda f: f.name):
            accepted = [f"`{json.dumps(value)}`" for value in field.neutral]
            notes = [field.note, f"accepted: {', '.join(accepted)}" if accepted else ""]
            lines.append(f"| `{field.name}` | {status} | {'; '.join(filter(None, notes))} |")
    return "\n".join(lines)


def check_refused(body: Mapping[str, Any], table: tuple[Field, ...]) -> None:
    """Raises InvalidRequest for the first field of `body` that asks for something refused."""
    for field in table:
        value = body.get(field.name)
        if field.status != "refused" or value is None or value in ("", [], {}):
            continue
        if not any(_same(value, accepted) for accepted in field.neutral):
            note = f": {field.note}" if field.note else ""
            raise InvalidRequest(f"{field.name} is not supported{note}", param=field.name)


def unknown_fields(body: Mapping[str, Any], table: tuple[Field, ...]) -> tuple[str, ...]:
    """Names in `body` that the table does not know; the first few, shortened, since a caller chose them."""
    known = {field.name for field in table}
    return tuple(sorted(n[:64] for n, value in body.items() if n not in known and value is not None)[:20])


def _same(value: Any, accepted: Any) -> bool:
    """Equality in which true is not 1."""
    return isinstance(value, bool) == isinstance(accepted, bool) and bool(value == accepted)

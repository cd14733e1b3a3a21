"""Requests to work: token ids and a fully resolved `Sampling` for each prompt.

Defaults: what a request leaves out comes from the checkpoint's generation_config (temperature, top_p, top_k,
repetition_penalty), else it is off; `temperature 1, top_p 1, top_k -1, repetition_penalty 1` in a request turn all
of that off. A greedy request keeps the checkpoint's repetition penalty. min_p, the other penalties and biases are
never on unless asked for. Temperatures however small are passed on as they are.
Without max_tokens a chat answer may fill the context and a completion has 16 tokens, as in the OpenAI API; either
has fewer where n choices of that length can never fit into a worker's memory.
A seed is taken modulo 2**64, so that negative ones work. Every prompt of a list gets the client's own seed, so
it is answered as if it were alone; without a seed each prompt draws its own.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable, Sequence
from dataclasses import dataclass

from router.openai.form import Form, FormBuilder
from router.openai.infill import fill_in_the_middle
from router.openai.requests import ChatRequest, CompletionRequest
from router.openai.room import default_length, refuse_long_text, room_for_answer, truncated
from router.text.choice import ChoiceText, split_stops
from router.text.conversation import ConversationEncoder
from router.text.echo import Echo
from router.text.stop import StopSet
from router.text.template import ChatTemplate
from router.text.tokenizer import TextTokenizer
from router.text.tools_choice import ToolChoiceText
from shared.errors import InvalidRequest
from shared.models.facts import ModelFacts
from shared.pool_size import PoolSize
from shared.wire import Sampling

COMPLETION_MAX_TOKENS = 16
MAX_STOP_TOKENS = 256
MAX_ECHO_LOGPROBS = 2**21
"""Numbers of one answer, some 30 MB of JSON: for each echoed token of each choice its own and the best ones'."""


@dataclass(frozen=True, slots=True)
class PlannedPrompt:
    """One prompt's part of the work; `num_choices` answers are wanted for it."""

    token_ids: list[int]
    sampling: Sampling


@dataclass(frozen=True, slots=True)
class Plan:
    """What a request asks for, ready to be sent to workers and to be turned back into text.

    num_choices: per prompt; the client sees sample j of prompt i as index i * num_choices + j.
    num_shown: per prompt; fewer than num_choices only with best_of, and then the best.
    every_entry: logprobs of every counted token are wanted, also of those without text.
    echoes: of each prompt, if they are shown.
    keep_special: special tokens are text. by_id: tokens of logprobs are named by their ids.
    form_field: the client's field that the grammar came from.
    """

    prompts: tuple[PlannedPrompt, ...]
    num_choices: int
    num_shown: int
    stops: StopSet
    include_usage: bool
    continuous_usage: bool
    logprobs: bool
    token_ids: bool
    echoes: tuple[Echo, ...] = ()
    every_entry: bool = False
    include_stop: bool = False
    keep_special: bool = False
    by_id: bool = False
    tool_names: tuple[str, ...] = ()
    form_field: str | None = None

    def prompt_ids(self) -> list[list[int]]:
        """The prompt of every choice, by the index that the client sees."""
        return [planned.token_ids for planned in self.prompts for _ in range(self.num_shown)]

    def choice_text(self, tokenizer: TextTokenizer, prompt: int, *, offset: int = 0) -> ChoiceText:
        """The text pipeline of one sample of prompt number `prompt`; `offset` characters stand before it."""
        planned = self.prompts[prompt]
        if self.tool_names:
            return ToolChoiceText(
                tokenizer,
                planned.token_ids,
                self.stops,
                names=self.tool_names,
                min_tokens=planned.sampling.min_tokens,
                include_stop=self.include_stop,
                keep_special=self.keep_special,
            )
        return ChoiceText(
            tokenizer,
            planned.token_ids,
            self.stops,
            min_tokens=planned.sampling.min_tokens,
            include_stop=self.include_stop,
            every_entry=self.every_entry,
            offset=offset,
            keep_special=self.keep_special,
        )


class Resolver:
    """Holds what all requests share. Pure computation: thread-safe, and slow only for long text."""

    def __init__(
        self, tokenizer: TextTokenizer, template: ChatTemplate, *, default_max_tokens: int | None = None
    ) -> None:
        """default_max_tokens: for requests that name none, in place of the endpoints' own defaults."""
        self._tokenizer = tokenizer
        self._conversations = ConversationEncoder(tokenizer, template)
        self._forms = FormBuilder(tokenizer.control_ids)
        self._default_max_tokens = default_max_tokens

    def completion(
        self,
        request: CompletionRequest,
        facts: ModelFacts,
        max_model_len: int,
        draw_seed: Callable[[], int],
        pools: Collection[PoolSize] = (),
    ) -> Plan:
        """Raises InvalidRequest or PromptTooLong before anything is sent anywhere."""
        check = self._length_check(request, max_model_len)
        prompts: list[list[int]] = []
        for prompt in request.prompt:
            if isinstance(prompt, str):
                check(prompt)
                prompts.append(self._tokenizer.encode(prompt, add_bos=request.add_special_tokens))
            else:
                prompts.append(prompt)
        if request.suffix:
            prompts = [fill_in_the_middle(self._tokenizer, prompt, request.suffix) for prompt in prompts]
        default = self._default_max_tokens or COMPLETION_MAX_TOKENS
        return self._plan(request, prompts, default, facts, max_model_len, draw_seed, pools)

    def chat(
        self,
        request: ChatRequest,
        facts: ModelFacts,
        max_model_len: int,
        draw_seed: Callable[[], int],
        pools: Collection[PoolSize] = (),
    ) -> Plan:
        """Raises InvalidRequest or PromptTooLong before anything is sent anywhere."""
        prompt = self.conversation_ids(request, self._length_check(request, max_model_len))
        default = self._default_max_tokens
        return self._plan(request, [prompt], default, facts, max_model_len, draw_seed, pools)

    def conversation_ids(self, request: ChatRequest, check: Callable[[str], None] | None = None) -> list[int]:
        """The prompt of a chat. check: gets it as text, before it is tokenised, and may raise.

        Raises InvalidRequest if the template cannot render it.
        """
        generation = request.add_generation_prompt
        return self._conversations.encode(
            request.messages,
            tools=[tool.definition for tool in request.tools] if request.tool_choice.mode != "none" else None,
            add_generation_prompt=not request.continue_final_message if generation is None else generation,
            continue_final_message=request.continue_final_message,
            variables=request.chat_template_kwargs,
            check=check,
            add_bos=request.add_special_tokens,
        )

    def _length_check(
        self, request: CompletionRequest | ChatRequest, max_model_len: int
    ) -> Callable[[str], None]:
        """What a prompt's text must pass before it is tokenised."""

        def check(text: str) -> None:
            if request.truncate_prompt_tokens is None:
                refuse_long_text(text, self._tokenizer, max_model_len, _prompt_field(request))

        return check

    def _plan(
        self,
        request: CompletionRequest | ChatRequest,
        prompts: list[list[int]],
        default_max_tokens: int | None,
        facts: ModelFacts,
        max_model_len: int,
        draw_seed: Callable[[], int],
        pools: Collection[PoolSize],
    ) -> Plan:
        param = _prompt_field(request)
        special_stops, stops = split_stops(request.stop, self._tokenizer)
        stop_token_ids = tuple(dict.fromkeys((*request.stop_token_ids, *special_stops)))
        if len(stop_token_ids) > MAX_STOP_TOKENS:
            raise InvalidRequest(
                f"stop_token_ids has more than {MAX_STOP_TOKENS} ids", param="stop_token_ids"
            )
        _check_ids(stop_token_ids, facts.vocab_size, "stop_token_ids")
        _check_ids(request.logit_bias, facts.vocab_size, "logit_bias")
        form = self._forms.build(request)
        base = _sampling(request, facts, stop_token_ids, form)
        num_choices = request.num_samples if isinstance(request, CompletionRequest) else request.n
        planned: list[PlannedPrompt] = []
        for token_ids in prompts:
            if not token_ids:
                raise InvalidRequest(f"{param} has no tokens", param=param)
            _check_ids(token_ids, facts.vocab_size, param)
            asked = request.asked_tokens
            token_ids = truncated(token_ids, request.truncate_prompt_tokens, asked, max_model_len)
            room = room_for_answer(len(token_ids), asked, max_model_len, param)
            max_tokens = asked
            if max_tokens is None:
                wanted = min(default_max_tokens or room, room)
                max_tokens = default_length(wanted, len(token_ids), num_choices, pools)
            seed = draw_seed() if request.seed is None else request.seed % 2**64
            changes = {
                "max_tokens": max_tokens,
                "min_tokens": min(request.min_tokens, max_tokens),
                "seed": seed,
            }
            planned.append(PlannedPrompt(token_ids, base.model_copy(update=changes)))
        options = request.stream_options
        is_echo = isinstance(request, CompletionRequest) and request.echo
        if is_echo:
            _check_echo(request, planned)
        return Plan(
            prompts=tuple(planned),
            num_choices=num_choices,
            num_shown=request.n,
            stops=stops,
            include_usage=bool(options and options.include_usage),
            continuous_usage=bool(options and options.continuous_usage_stats),
            logprobs=request.num_logprobs is not None,
            token_ids=bool(request.return_token_ids),
            echoes=tuple(Echo(self._tokenizer, p.token_ids) for p in planned) if is_echo else (),
            every_entry=isinstance(request, CompletionRequest),
            include_stop=request.include_stop_str_in_output,
            keep_special=not request.skip_special_tokens,
            by_id=request.return_tokens_as_token_ids,
            tool_names=form.tool_names,
            form_field=form.field,
        )


def _sampling(
    request: CompletionRequest | ChatRequest, facts: ModelFacts, stop_token_ids: tuple[int, ...], form: Form
) -> Sampling:
    """Everything but what differs from prompt to prompt."""
    defaults = facts.sampling
    num_logprobs = request.num_logprobs
    num_prompt_logprobs = None
    if isinstance(request, CompletionRequest):
        if request.echo:
            num_prompt_logprobs = num_logprobs
        if request.num_samples > request.n and num_logprobs is None:
            num_logprobs = 0  # the best are found by them
    return Sampling(
        temperature=defaults.temperature if request.temperature is None else request.temperature,
        top_p=defaults.top_p if request.top_p is None else request.top_p,
        top_k=defaults.top_k if request.top_k is None else max(0, request.top_k),
        min_p=request.min_p,
        repetition_penalty=(
            defaults.repetition_penalty if request.repetition_penalty is None else request.repetition_penalty
        ),
        presence_penalty=request.presence_penalty,
        frequency_penalty=request.frequency_penalty,
        logit_bias=request.logit_bias,
        max_tokens=1,
        stop_token_ids=stop_token_ids,
        ignore_eos=request.ignore_eos,
        num_logprobs=num_logprobs,
        num_prompt_logprobs=num_prompt_logprobs,
        grammar=form.grammar,
    )


def _check_echo(request: CompletionRequest | ChatRequest, prompts: Sequence[PlannedPrompt]) -> None:
    """Raises InvalidRequest for an answer that would be nothing but a flood of numbers."""
    if request.num_logprobs is None:
        return
    num_tokens = sum(len(planned.token_ids) for planned in prompts)
    asked = request.n * num_tokens * (request.num_logprobs + 1)
    if asked > MAX_ECHO_LOGPROBS:
        raise InvalidRequest(
            f"logprobs with echo: n times the prompt's tokens times (logprobs + 1) is {asked}; "
            f"at most {MAX_ECHO_LOGPROBS} are allowed in one request",
            param="logprobs",
        )


def _prompt_field(request: CompletionRequest | ChatRequest) -> str:
    return "messages" if isinstance(request, ChatRequest) else "prompt"


def _check_ids(ids: Iterable[int], vocab_size: int, param: str) -> None:
    """Ids index rows of the model's output layer; rows that no token has are legal."""
    lowest, highest = min(ids, default=0), max(ids, default=0)
    if lowest < 0 or highest >= vocab_size:
        wrong = lowest if lowest < 0 else highest
        raise InvalidRequest(
            f"{param} has token id {str(wrong)[:32]}, but ids are from 0 to {vocab_size - 1}", param=param
        )

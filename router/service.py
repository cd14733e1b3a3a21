"""From a client's bytes to an answer that is under way: parse, name, plan, admit."""

from __future__ import annotations

import secrets
import time
from collections.abc import Callable, Mapping
from functools import partial
from time import perf_counter
from types import MappingProxyType
from typing import Literal, TypeVar

import structlog
from starlette.requests import Request
from starlette.responses import Response

from router.answering import Answer, Answering
from router.checkpoint import Checkpoint
from router.generation import Generation
from router.metrics import RouterMetrics
from router.offload import Offload
from router.openai.blame import in_client_words
from router.openai.body import refuse_deep
from router.openai.requests import ChatRequest, CompletionRequest, parse_chat, parse_completion
from router.openai.resolve import Plan, Resolver
from router.openai.response_answer import ResponseAnswer
from router.openai.response_request import ResponseRequest, parse_response
from router.openai.responses import ChatAnswer, CompletionAnswer
from router.openai.shared_fields import Limits
from router.relay import Dispatcher
from router.settings import RouterSettings
from router.workers.registry import Registry
from shared.asgi.body import read_body
from shared.asgi.context import request_id_of
from shared.asgi.disconnect import finish, run_until_disconnect
from shared.asgi.stream import SSE, OwnedStream
from shared.errors import InvalidRequest, Overloaded, ServingError, Unavailable

T = TypeVar("T")
Endpoint = Literal["chat", "completions", "responses"]
_PARSERS: Mapping[Endpoint, Callable[[bytes, Limits], ChatRequest | CompletionRequest]] = MappingProxyType(
    {"chat": parse_chat, "completions": parse_completion, "responses": parse_response}
)
_log = structlog.get_logger(__name__)


class Service:
    """Serves every endpoint that generates. Holds no request's state but the number of prompts in flight."""

    def __init__(
        self,
        settings: RouterSettings,
        checkpoint: Checkpoint,
        registry: Registry,
        dispatcher: Dispatcher,
        metrics: Callable[[Service], RouterMetrics],
        offload: Offload,
    ) -> None:
        self._settings = settings
        self._checkpoint = checkpoint
        self._registry = registry
        self._dispatcher = dispatcher
        self._limits = Limits()
        self._offload = offload
        self._resolver = Resolver(
            checkpoint.tokenizer, checkpoint.template, default_max_tokens=settings.default_max_tokens
        )
        self._told_unknown: set[str] = set()
        self.in_flight = 0
        self._metrics = metrics(self)

    async def answer(self, request: Request, endpoint: Endpoint) -> Response:
        """The response to a request; a stream has not begun then. Raises ServingError."""
        started = perf_counter()
        try:
            if request.app.state.draining:
                raise Unavailable("the router is shutting down", retry_after_s=self._settings.retry_after_s)
            body = await read_body(
                request, limit_bytes=self._settings.max_body_bytes, timeout_s=self._settings.body_timeout_s
            )
            started = perf_counter()
            parsed, plan = await self._plan(request, body, endpoint)
            self._admit(len(plan.prompts))
        except ServingError as exc:
            self._metrics.refused(endpoint, exc.code)
            raise
        answering = self._begin(request, parsed, plan, endpoint, started)
        if parsed.stream:
            return OwnedStream(answering, SSE)
        try:
            return await run_until_disconnect(request.receive, answering.whole())
        finally:
            await finish(answering.aclose())

    async def _plan(
        self, request: Request, body: bytes, endpoint: Endpoint
    ) -> tuple[ChatRequest | CompletionRequest, Plan]:
        """What the client wants, as token ids and sampling. Long bodies and grammars are worked on in a thread.

        Every byte can cost as much as text does: messages without any, tool calls, variables.
        """
        max_model_len = self._checkpoint.max_model_len(self._registry.max_model_len())
        pools = self._registry.pools()

        def parse() -> ChatRequest | CompletionRequest:
            parsed = _PARSERS[endpoint](body, self._limits)
            self._checkpoint.check_name(parsed.model)
            return parsed

        def resolve(parsed: ChatRequest | CompletionRequest) -> Plan:
            facts = self._checkpoint.facts
            if isinstance(parsed, ChatRequest):
                try:
                    return self._resolver.chat(parsed, facts, max_model_len, _draw_seed, pools)
                except InvalidRequest as exc:
                    raise parsed.in_own_words(exc) from exc
            return self._resolver.completion(parsed, facts, max_model_len, _draw_seed, pools)

        def both(*, is_short: bool) -> tuple[ChatRequest | CompletionRequest, Plan | None]:
            parsed = parse()
            return parsed, None if is_short and parsed.has_form else resolve(parsed)

        async def in_thread(work: Callable[[], T]) -> T:
            return await run_until_disconnect(request.receive, self._offload.in_thread(len(body), work))

        with refuse_deep():
            if self._offload.is_long(len(body)):
                parsed, plan = await in_thread(partial(both, is_short=False))
            else:
                parsed, plan = await self._offload.here(partial(both, is_short=True))
            self._tell_unknown(parsed.unknown)
            if plan is None:
                plan = await in_thread(partial(resolve, parsed))
            return parsed, plan

    def _admit(self, num_prompts: int) -> None:
        if self.in_flight and self.in_flight + num_prompts > self._settings.max_inflight:
            raise Overloaded(
                "the router serves as many requests as it may", retry_after_s=self._settings.retry_after_s
            )
        self.in_flight += num_prompts

    def _release(self, num_prompts: int) -> None:
        self.in_flight -= num_prompts

    def _begin(
        self,
        request: Request,
        parsed: ChatRequest | CompletionRequest,
        plan: Plan,
        endpoint: Endpoint,
        started: float,
    ) -> Answering:
        request_id = request_id_of(request.scope)
        generation = Generation(
            self._dispatcher,
            plan,
            self._checkpoint.tokenizer,
            request_id=request_id,
            timeout_s=self._settings.request_timeout_s,
            started=started,
            in_client_words=partial(in_client_words, parsed, plan.form_field),
        )
        return Answering(
            generation,
            self._answer(parsed, plan, request_id.removeprefix("req-")),
            endpoint=endpoint,
            stream=parsed.stream,
            continuous_usage=plan.continuous_usage,
            started=started,
            metrics=self._metrics,
            offload=self._offload,
            release=partial(self._release, len(plan.prompts)),
        )

    def _answer(self, parsed: ChatRequest | CompletionRequest, plan: Plan, response_id: str) -> Answer:
        model, created = self._checkpoint.name, int(time.time())
        if isinstance(parsed, ResponseRequest):
            sampling = plan.prompts[0].sampling
            drawn = {"temperature": sampling.temperature, "top_p": sampling.top_p}
            return ResponseAnswer(
                response_id,
                created=created,
                model=model,
                told=parsed.told | drawn,
                tokenizer=self._checkpoint.tokenizer,
            )
        make = ChatAnswer if isinstance(parsed, ChatRequest) else CompletionAnswer
        return make(
            response_id,
            created=created,
            model=model,
            fingerprint=f"handoff-{self._checkpoint.tokenizer_digest[:8]}",
            tokenizer=self._checkpoint.tokenizer,
            include_usage=plan.include_usage,
            logprobs=plan.logprobs,
            by_id=plan.by_id,
            prompts=plan.prompt_ids() if plan.token_ids else None,
        )

    def _tell_unknown(self, names: tuple[str, ...]) -> None:
        """Log each unknown field once, and not without end."""
        for name in names:
            if name not in self._told_unknown and len(self._told_unknown) < 100:
                self._told_unknown.add(name)
                _log.info("unknown_field_ignored", field=name[:64])


def _draw_seed() -> int:
    return secrets.randbits(63)

"""What happens after a forward pass: sample, find ends, deliver. Runs on the engine thread."""

from __future__ import annotations

from collections.abc import Callable, Sequence

from torch import Tensor

from shared.engine.grammar import GrammarState
from shared.engine.prompt_scores import score_prompt
from shared.engine.sampler import sample
from shared.engine.scheduler import Scheduler
from shared.engine.sequence import Group, Mode, PromptProgress, PromptScores, State
from shared.engine.step import Chunk, Step
from shared.errors import ServingError
from shared.wire import Finish, FinishReason, First, TokenOut


class OutputStep:
    """Applies the logits of a step to its groups."""

    def __init__(self, scheduler: Scheduler, eos: frozenset[int], clock: Callable[[], float]) -> None:
        self._scheduler = scheduler
        self._eos = eos
        self._clock = clock

    def apply(self, step: Step, logits_BV: Tensor) -> int:
        """Sample every row and deliver the tokens. Returns how many tokens were made.

        Row order is the runner's: decodes, then each chunk's.
        A request whose sampling fails is ended alone.
        """
        made: dict[int, tuple[Group, list[TokenOut]]] = {}
        for row, seq in enumerate(step.decodes):
            group = seq.group
            if group.state is State.ENDED:
                continue
            self._scheduler.decoded(seq)
            try:
                out = self._next_token(group, logits_BV[row], seq.choice, seq.outputs, seq.grammar)
            except ServingError as exc:
                self._scheduler.fail(group, exc)
                continue
            seq.outputs.append(out.token_id)
            seq.finish_reason = out.finish_reason
            if seq.grammar is not None and out.finish_reason is None:
                seq.grammar.advance([out.token_id])
            made.setdefault(id(group), (group, []))[1].append(out)
        row = len(step.decodes)
        num_first = 0
        for chunk in step.chunks:
            rows_TV = logits_BV[row : row + chunk.num_logits]
            row += chunk.num_logits
            if chunk.group.state is not State.ENDED:
                num_first += self._prompt_ran(chunk, rows_TV)
        for group, tokens in made.values():
            if group.state is not State.ENDED:
                group.num_output_tokens += len(tokens)
                group.deliver(tokens)
                self.retire(group)
        return num_first + sum(len(tokens) for _, tokens in made.values())

    def stop_choices(self, group: Group, choices: Sequence[int]) -> None:
        """End these choices without a token, now or, while KV is on its way, before their first step."""
        if group.state is not State.RUNNING:
            group.stopped.update(choices)
            return
        for seq in group.running():
            if seq.choice in choices:
                seq.finish_reason = "stop"
        self.retire(group)

    def _prompt_ran(self, chunk: Chunk, rows_TV: Tensor) -> int:
        group = chunk.group
        self._scheduler.prompt_computed(chunk)
        wanted = group.choices if group.sampling.max_tokens else ()
        try:
            if group.is_scored:
                self._score(chunk, rows_TV)
            if not chunk.is_last:
                return 0
            earlier, grammar = group.earlier_outputs, group.grammar
            tokens = [self._next_token(group, rows_TV[-1], c, earlier, grammar) for c in wanted]
        except ServingError as exc:
            self._scheduler.fail(group, exc)
            return 0
        group.ready_at = self._clock()
        started = group.prompt_started_at if group.prompt_started_at is not None else group.ready_at
        group.num_output_tokens += len(tokens)
        if group.mode is Mode.PREFILL:
            group.state = State.HELD
            if group.progress is not None:
                _tell(group.progress, tokens)
        first = First(
            tokens=tokens,
            cached_tokens=group.num_cached,
            computed_tokens=len(group.token_ids) - group.num_cached,
            queue_s=started - group.submitted_at,
            prefill_s=group.ready_at - started,
        )
        group.deliver(first)
        if group.mode is Mode.LOCAL:
            going_on = {t.choice: t.token_id for t in tokens if t.finish_reason is None}
            self._scheduler.fork(group, going_on)
            self.retire(group)
        return len(tokens)

    def _score(self, chunk: Chunk, rows_TV: Tensor) -> None:
        """Deliver the logprobs of the tokens that follow the chunk's rows; the prompt's last row has none."""
        group = chunk.group
        targets = group.token_ids[chunk.start + 1 : chunk.end + 1]
        scores = score_prompt(rows_TV[: len(targets)], targets, group.sampling.num_prompt_logprobs or 0)
        if scores:
            group.deliver(PromptScores(scores))

    def _next_token(
        self,
        group: Group,
        logits_V: Tensor,
        choice: int,
        outputs: Sequence[int],
        grammar: GrammarState | None,
    ) -> TokenOut:
        sampling = group.sampling
        ends = set(sampling.stop_token_ids)
        if not sampling.ignore_eos:
            ends |= self._eos
        banned = ends if len(outputs) < sampling.min_tokens else set[int]()
        allowed = None
        if grammar is not None:
            unwanted = banned | self._eos if sampling.ignore_eos else banned
            allowed, banned = grammar.allowed(unwanted), set()
        token, logprobs = sample(
            logits_V,
            sampling,
            choice=choice,
            prompt=group.prompt_ids,
            outputs=outputs,
            banned=sorted(banned),
            allowed=allowed,
        )
        reason: FinishReason | None = None
        if token in ends or (grammar is not None and grammar.is_end(token)):
            reason = "stop"
        elif len(outputs) + 1 >= sampling.max_tokens:
            reason = "length"
        return TokenOut(choice=choice, token_id=token, logprobs=logprobs, finish_reason=reason)

    def retire(self, group: Group) -> None:
        """Free the sequences that have finished; without any left the group has ended."""
        for seq in [s for s in group.sequences if s.finish_reason is not None]:
            self._scheduler.finish_sequence(seq)
            group.sequences.remove(seq)
        if group.sequences:
            return
        now = self._clock()
        started = group.decode_started_at if group.decode_started_at is not None else now
        self._scheduler.end(group)
        group.deliver(
            Finish(
                kv_bytes_received=0,
                prompt_tokens_computed=(
                    len(group.token_ids) - group.num_cached if group.mode is Mode.LOCAL else 0
                ),
                output_tokens=group.num_output_tokens,
                decode_queue_s=started - group.ready_at,
                decode_s=now - started,
            )
        )


def _tell(progress: PromptProgress, tokens: Sequence[TokenOut]) -> None:
    """From here on the rest of the transfer is exposed; without a choice to go on with there is none."""
    finished = [token.finish_reason is not None for token in tokens]
    if all(finished):
        progress.cancel("every choice ended with its first token")
    else:
        progress.finish([token.token_id for token in tokens], finished)

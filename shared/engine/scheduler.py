"""Which groups get blocks, and which tokens run in the next step. Pure Python, the clock is passed in.

Admission is first come, first served, by worst case: a group starts only when every block that it can ever need
is promised to it. So nothing is preempted, and a request that was let in never fails for want of room.
A step is one decode token of every running sequence, then prompt chunks of at most `chunk_size` tokens together.
"""

from __future__ import annotations

from collections import deque

from shared.engine.blocks import ROOT_HASH, BlockPool, chain_hash, prefix_hashes
from shared.engine.sequence import Admitted, Failed, Group, Mode, Sequence, State
from shared.engine.step import Chunk, Limits, Step
from shared.errors import (
    DeadlineExceeded,
    EngineFault,
    InvalidRequest,
    InvariantBroken,
    Overloaded,
    PromptTooLong,
    ServingError,
)
from shared.pool_size import PoolSize

MAX_SCORED_ROWS = 128
"""Prompt tokens a step of a prompt that is scored: each of them has logits over the whole vocabulary."""


class Scheduler:
    """Owns the queue, the admitted groups and, through the pool, every block table."""

    def __init__(self, pool: BlockPool, limits: Limits) -> None:
        self.pool = pool
        self.size = PoolSize(pool.num_blocks, pool.block_size)
        self.limits = limits
        self.waiting: deque[Group] = deque()
        self.active: list[Group] = []

    def check(self, group: Group) -> None:
        """Refuse what can never run, before it is queued. Raises InvalidRequest, PromptTooLong or Overloaded."""
        work = group.work
        num_tokens = len(work.token_ids)
        if max(work.token_ids) >= self.limits.vocab_size:
            raise InvalidRequest(f"token ids must be below {self.limits.vocab_size}", param="token_ids")
        if any(
            t >= self.limits.vocab_size for t in (*work.sampling.logit_bias, *work.sampling.stop_token_ids)
        ):
            raise InvalidRequest(f"token ids must be below {self.limits.vocab_size}", param="sampling")
        if num_tokens + work.max_new_tokens > self.limits.max_model_len:
            raise PromptTooLong(
                f"This model's maximum context length is {self.limits.max_model_len} tokens. However, "
                f"{num_tokens + work.max_new_tokens} tokens were asked for ({num_tokens} in the prompt, "
                f"{work.max_new_tokens} for the answer)."
            )
        if work.num_choices > self.limits.max_num_seqs:
            raise InvalidRequest(f"at most {self.limits.max_num_seqs} choices run at a time here", param="n")
        if self._worst_case(group, num_shared=0) > self.pool.num_blocks:
            raise InvalidRequest("the request needs more KV memory than this worker has", param="max_tokens")
        if len(self.waiting) >= self.limits.max_queued:
            raise Overloaded("the queue is full", retry_after_s=1.0)

    def add(self, group: Group) -> None:
        """Queue a checked group."""
        group.block_names = prefix_hashes(group.token_ids, self.pool.block_size)
        self.waiting.append(group)

    def expire(self, now: float) -> None:
        """End every group whose deadline has passed, or that has waited too long for room.

        What fits is admitted in between: who came during a long step has waited for the step, not for room.
        """
        for group in [g for g in (*self.waiting, *self.active) if g.deadline <= now]:
            self.fail(group, DeadlineExceeded("the request's deadline passed"))
        self.admit()
        for group in [g for g in self.waiting if g.submitted_at + self.limits.queue_timeout_s <= now]:
            self.fail(group, Overloaded("the worker has no room for this request", retry_after_s=1.0))

    def next_deadline(self) -> float | None:
        """When `expire` has something to do next."""
        limit_s = self.limits.queue_timeout_s
        waiting = (min(g.deadline, g.submitted_at + limit_s) for g in self.waiting)
        # A group that has ended may wait long for its release; its deadline must not keep the engine awake.
        active = (g.deadline for g in self.active if g.state is not State.ENDED)
        return min((*waiting, *active), default=None)

    def admit(self) -> None:
        """Grant blocks to the head of the queue for as long as it fits."""
        while self.waiting:
            group = self.waiting[0]
            num_choices = sum(g.work.num_choices for g in self.active) + group.work.num_choices
            if num_choices > self.limits.max_num_seqs or not self._grant(group):
                return
            self.waiting.popleft()
            self.active.append(group)
            group.state = State.RECEIVING if group.mode is Mode.RECEIVE else State.PROMPT
            group.deliver(Admitted(group.num_cached, tuple(group.blocks)))

    def schedule(self) -> Step:
        """The next step; empty when nothing can run. Blocks that it needs are taken here."""
        step = Step()
        budget = self.limits.chunk_size
        for group in self.active:
            if group.state is State.RUNNING:
                for seq in group.running():
                    self._make_room(seq, step)
                    step.decodes.append(seq)
        for group in self.active:
            if group.state is not State.PROMPT:
                continue
            start, end = group.num_computed, len(group.token_ids)
            if self.limits.chunk_size:
                end = min(end, start + budget)
            if group.is_scored:
                end = min(end, start + MAX_SCORED_ROWS)
            if end > start:
                step.chunks.append(Chunk(group, start, end))
                budget -= end - start
            if budget <= 0:
                break
        return step

    def prompt_computed(self, chunk: Chunk) -> None:
        """KV of a chunk lies in the pool: count it and make its full blocks findable."""
        group = chunk.group
        group.num_computed = chunk.end
        self._register_prompt(group)
        if group.progress is not None:
            group.progress.advance(chunk.end)

    def received(self, group: Group) -> None:
        """KV of the whole prompt was verified."""
        if group.state is not State.RECEIVING:
            raise InvariantBroken(f"KV arrived for a group in state {group.state.value}")
        group.num_computed = len(group.token_ids)
        self._register_prompt(group)

    def fork(self, group: Group, first_tokens: dict[int, int]) -> None:
        """Start one sequence for each choice in `first_tokens` (choice -> token id), sharing the prompt's blocks.

        The blocks are copied on the first write to a shared one. The group's own hold on them ends here.
        """
        for choice, token in first_tokens.items():
            for block in group.blocks:
                self.pool.share(block)
            outputs = [*group.earlier_outputs, token]
            seq = Sequence(group, choice, list(group.blocks), outputs, len(group.token_ids))
            seq.grammar = group.grammar.after(token) if group.grammar is not None else None
            group.sequences.append(seq)
        group.state = State.RUNNING
        self._free_prompt(group)

    def decoded(self, seq: Sequence) -> None:
        """The newest token of a sequence was run; its KV lies in the pool."""
        seq.num_computed += 1
        size = self.pool.block_size
        if seq.group.is_exact and seq.num_computed % size == 0:
            index = seq.num_computed // size - 1
            names = seq.group.block_names
            parent = seq.names[-1] if seq.names else (names[-1] if names else ROOT_HASH)
            content = [seq.token_at(p) for p in range(index * size, (index + 1) * size)]
            seq.names.append(chain_hash(parent, content))
            self.pool.register(seq.table[index], seq.names[-1])

    def finish_sequence(self, seq: Sequence) -> None:
        """Free a sequence that has its finish reason."""
        self._free_table(seq.table)

    def fail(self, group: Group, error: ServingError) -> None:
        """End a group with an error that its owner is told.

        What the engine failed on may lie in the group's KV, so no later request finds it.
        """
        if group.state is not State.ENDED:
            if isinstance(error, EngineFault):
                for block in (*group.blocks, *(block for seq in group.sequences for block in seq.table)):
                    self.pool.forget(block)
            self.end(group)
            group.deliver(Failed(error))

    def end(self, group: Group) -> None:
        """No more compute for this group. Sequences are freed; prompt blocks stay until `release`."""
        if group in self.waiting:
            self.waiting.remove(group)
        for seq in group.sequences:
            self.finish_sequence(seq)
        group.sequences.clear()
        group.state = State.ENDED

    def release(self, group: Group) -> None:
        """Nobody reads or writes this group's blocks any more: give everything back. Idempotent."""
        if group.state is not State.ENDED:
            self.end(group)
        self._free_prompt(group)
        if group.lease is not None:
            group.lease.close()
        if group in self.active:
            self.active.remove(group)

    def is_idle(self) -> bool:
        """Nothing is computed now: no runnable sequence and no prompt left to run."""
        return not any(g.state is State.PROMPT or g.state is State.RUNNING for g in self.active)

    # -- internal

    def _worst_case(self, group: Group, num_shared: int) -> int:
        """Blocks beyond `num_shared` that the group can ever need."""
        work = group.work
        num_tokens = len(work.token_ids)
        if group.mode is Mode.PREFILL:
            return self.size.blocks_of(num_tokens) - num_shared
        return self.size.worst_case(num_tokens, work.num_choices, work.max_new_tokens) - num_shared

    def _grant(self, group: Group) -> bool:
        size = self.pool.block_size
        names = group.block_names
        # Whoever computes the prompt must run at least its last token to get logits.
        usable = names if group.mode is Mode.RECEIVE else names[: (len(group.token_ids) - 1) // size]
        shared = [] if group.is_scored else self.pool.lookup(usable)
        lease = self.pool.admit(shared, self._worst_case(group, len(shared)))
        if lease is None:
            return False
        num_prompt_blocks = self.size.blocks_of(len(group.token_ids))
        group.lease = lease
        group.blocks = shared + [lease.take() for _ in range(num_prompt_blocks - len(shared))]
        group.num_cached = group.num_computed = len(shared) * size
        return True

    def _make_room(self, seq: Sequence, step: Step) -> None:
        """A private slot for the position that runs next."""
        lease = seq.group.lease
        if lease is None:
            raise InvariantBroken("a running group has no lease")
        index = seq.num_computed // self.pool.block_size
        if index == len(seq.table):
            seq.table.append(lease.take())
        elif self.pool.owners(seq.table[index]) > 1:
            fresh = lease.take()
            step.copies.append((seq.table[index], fresh))
            self.pool.free(seq.table[index])
            seq.table[index] = fresh

    def _register_prompt(self, group: Group) -> None:
        """Names stand for exact KV: else a request's tokens would depend on how an earlier one's KV had come."""
        if not group.is_exact:
            return
        for block, name in zip(
            group.blocks, group.block_names[: group.num_computed // self.pool.block_size], strict=False
        ):
            self.pool.register(block, name)

    def _free_prompt(self, group: Group) -> None:
        self._free_table(group.blocks)

    def _free_table(self, table: list[int]) -> None:
        """From the end: of a cached chain the last block is evicted first, for without its head it is no use."""
        while table:
            self.pool.free(table.pop())

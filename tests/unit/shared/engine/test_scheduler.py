"""The scheduler, case by case."""

from __future__ import annotations

import pytest

from shared.engine.blocks import BlockPool
from shared.engine.scheduler import Chunk, Limits, Scheduler
from shared.engine.sequence import Admitted, Event, Failed, Group, Mode, State
from shared.errors import DeadlineExceeded, InvalidRequest, InvariantBroken, Overloaded, PromptTooLong
from tests.unit.shared.engine.helpers import VOCAB, make_limits, make_work

FOREVER = 1e9


def _scheduler(num_blocks: int = 32, block_size: int = 4, limits: Limits | None = None) -> Scheduler:
    return Scheduler(BlockPool(num_blocks, block_size), limits or make_limits())


def _group(
    num_tokens: int,
    mode: Mode = Mode.LOCAL,
    *,
    n: int = 1,
    deadline: float = FOREVER,
    first_token: int = 0,
    **sampling: object,
) -> tuple[Group, list[Event]]:
    events: list[Event] = []
    tokens = [(first_token + i) % VOCAB for i in range(num_tokens)]
    return Group(make_work(tokens, num_choices=n, **sampling), mode, deadline, events.append), events


def _compute_prompt(scheduler: Scheduler, group: Group) -> None:
    """Admit the group and pretend that its whole prompt ran."""
    scheduler.add(group)
    scheduler.admit()
    scheduler.prompt_computed(Chunk(group, group.num_computed, len(group.token_ids)))


def test_a_prompt_beyond_the_context_is_refused_in_words_that_clients_search_for() -> None:
    """Prompt plus answer are compared with the limit; exactly the limit fits."""
    scheduler = _scheduler(limits=make_limits(max_model_len=20))
    scheduler.check(_group(10, max_tokens=10)[0])
    with pytest.raises(
        PromptTooLong, match=r"maximum context length is 20 tokens.*21 tokens.*11 in the prompt"
    ):
        scheduler.check(_group(11, max_tokens=10)[0])


@pytest.mark.parametrize(
    "sampling", [{"logit_bias": {VOCAB: 1.0}}, {"stop_token_ids": (VOCAB,)}], ids=["bias", "stop"]
)
def test_sampling_token_ids_outside_the_vocabulary_are_refused(sampling: dict[str, object]) -> None:
    """An id that would index past the logits never reaches them."""
    with pytest.raises(InvalidRequest, match=f"below {VOCAB}"):
        _scheduler().check(_group(3, **sampling)[0])


def test_prompt_token_ids_outside_the_vocabulary_are_refused() -> None:
    """The first id past the end is refused, the last one inside is not."""
    scheduler = _scheduler()
    scheduler.check(Group(make_work([VOCAB - 1]), Mode.LOCAL, FOREVER, print))
    with pytest.raises(InvalidRequest, match=f"below {VOCAB}"):
        scheduler.check(Group(make_work([VOCAB]), Mode.LOCAL, FOREVER, print))


def test_more_choices_than_can_ever_run_are_refused() -> None:
    """n is bounded by max_num_seqs."""
    with pytest.raises(InvalidRequest, match="at most 2 choices"):
        _scheduler(limits=make_limits(max_num_seqs=2)).check(_group(3, n=3)[0])


def test_a_request_that_needs_more_blocks_than_exist_is_refused() -> None:
    """What could wait for ever is said at once; what just fits is let in."""
    scheduler = _scheduler(num_blocks=3, block_size=4)
    scheduler.check(_group(8, max_tokens=5)[0])
    with pytest.raises(InvalidRequest, match="more KV memory"):
        scheduler.check(_group(8, max_tokens=6)[0])


def test_a_full_queue_asks_to_come_back() -> None:
    """The refusal is retryable and says when."""
    scheduler = _scheduler(limits=make_limits(max_queued=1))
    scheduler.add(_group(3)[0])
    with pytest.raises(Overloaded) as caught:
        scheduler.check(_group(3)[0])
    assert (True, 1.0) == (caught.value.retryable, caught.value.retry_after_s)


@pytest.mark.parametrize(
    ("num_tokens", "mode", "n", "max_tokens", "wanted"),
    [
        (4, Mode.PREFILL, 4, 50, 1),
        (5, Mode.PREFILL, 1, 50, 2),
        (4, Mode.LOCAL, 1, 1, 1),
        (4, Mode.LOCAL, 1, 2, 2),
        (4, Mode.LOCAL, 1, 5, 2),
        (4, Mode.LOCAL, 1, 6, 3),
        (4, Mode.RECEIVE, 3, 5, 4),
        (5, Mode.LOCAL, 3, 1, 2),
        (5, Mode.LOCAL, 3, 4, 4),
        (5, Mode.LOCAL, 3, 5, 7),
    ],
)
def test_the_worst_case_counts_growth_of_every_choice_and_its_copy(
    num_tokens: int, mode: Mode, n: int, max_tokens: int, wanted: int
) -> None:
    """Blocks of four: the last token needs no slot, and n choices need n - 1 copies of a partial block."""
    scheduler = _scheduler()
    group, _ = _group(num_tokens, mode, n=n, max_tokens=max_tokens)
    scheduler.add(group)
    scheduler.admit()
    counts = scheduler.pool.counts()
    assert wanted == counts.live + counts.promised


def test_admission_does_not_overtake() -> None:
    """A small request waits behind a large one that does not fit yet."""
    scheduler = _scheduler(num_blocks=4)
    holder, large, small = _group(9, max_tokens=1), _group(9, first_token=20), _group(1, first_token=40)
    for group, _ in (holder, large, small):
        scheduler.add(group)
    scheduler.admit()
    assert [True, False, False] == [bool(events) for _, events in (holder, large, small)]
    scheduler.release(holder[0])
    scheduler.admit()
    assert [large[0], small[0]] == scheduler.active


def test_choices_admitted_at_a_time_are_bounded() -> None:
    """A group counts with all of its choices until it is released."""
    scheduler = _scheduler(limits=make_limits(max_num_seqs=3))
    (first, _), (second, _) = _group(2, n=2), _group(2, n=2)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.admit()
    assert [first] == scheduler.active
    scheduler.release(first)
    scheduler.admit()
    assert [second] == scheduler.active


def test_decodes_go_before_chunks_and_chunks_share_the_budget() -> None:
    """A step is one token of every running sequence, then prompts in order up to chunk_size tokens."""
    scheduler = _scheduler(limits=make_limits(chunk_size=6))
    running, _ = _group(3, n=2)
    _compute_prompt(scheduler, running)
    scheduler.fork(running, {0: 5, 1: 6})
    prompts = [_group(4, first_token=20)[0], _group(9, first_token=30)[0], _group(2, first_token=50)[0]]
    for group in prompts:
        scheduler.add(group)
    scheduler.admit()
    step = scheduler.schedule()
    assert [0, 1] == [seq.choice for seq in step.decodes]
    assert [Chunk(prompts[0], 0, 4), Chunk(prompts[1], 0, 2)] == step.chunks
    assert [running, *prompts[:2]] == sorted(step.groups, key=scheduler.active.index)


def test_chunk_size_0_runs_one_whole_prompt_a_step() -> None:
    """Unchunked prefill takes prompts one by one."""
    scheduler = _scheduler()
    first, second = _group(9)[0], _group(5, first_token=30)[0]
    scheduler.add(first)
    scheduler.add(second)
    scheduler.admit()
    assert [Chunk(first, 0, 9)] == scheduler.schedule().chunks
    scheduler.prompt_computed(Chunk(first, 0, 9))
    scheduler.end(first)
    assert [Chunk(second, 0, 5)] == scheduler.schedule().chunks


@pytest.mark.parametrize(("num_tokens", "cached"), [(1, 0), (4, 0), (5, 4), (8, 4), (9, 8)])
@pytest.mark.parametrize("mode", [Mode.LOCAL, Mode.PREFILL])
def test_a_cached_prompt_still_runs_its_last_token(num_tokens: int, cached: int, mode: Mode) -> None:
    """Logits need one computed token, so a full hit on a block boundary leaves the last block to compute."""
    scheduler = _scheduler()
    first, _ = _group(num_tokens)
    _compute_prompt(scheduler, first)
    scheduler.release(first)
    again, events = _group(num_tokens, mode)
    scheduler.add(again)
    scheduler.admit()
    assert [Admitted(cached, tuple(again.blocks))] == events
    assert [Chunk(again, cached, num_tokens)] == scheduler.schedule().chunks


@pytest.mark.parametrize(("num_tokens", "cached"), [(1, 0), (4, 4), (5, 4), (8, 8)])
def test_a_receiver_uses_every_cached_block(num_tokens: int, cached: int) -> None:
    """Who receives needs no logits of the prompt, so a full hit leaves nothing to send."""
    scheduler = _scheduler()
    first, _ = _group(num_tokens)
    _compute_prompt(scheduler, first)
    scheduler.release(first)
    again, _ = _group(num_tokens, Mode.RECEIVE)
    scheduler.add(again)
    scheduler.admit()
    assert cached == again.num_cached


def test_blocks_are_found_only_once_their_kv_is_there() -> None:
    """A prompt that was admitted, and one whose KV is still coming, share nothing yet."""
    scheduler = _scheduler()
    for mode in (Mode.LOCAL, Mode.RECEIVE):
        scheduler.add(_group(9, mode)[0])
    late, _ = _group(9)
    scheduler.add(late)
    scheduler.admit()
    assert 0 == late.num_cached


def test_an_evicted_chain_loses_its_end_first() -> None:
    """A prefix whose first block is gone is worthless: one block of room must cost one block of hits."""
    scheduler = _scheduler(num_blocks=4)
    first, _ = _group(16, Mode.PREFILL)
    _compute_prompt(scheduler, first)
    scheduler.release(first)
    other, _ = _group(1, Mode.PREFILL, first_token=40)
    scheduler.add(other)
    scheduler.admit()
    scheduler.release(other)
    again, _ = _group(16, Mode.PREFILL)
    scheduler.add(again)
    scheduler.admit()
    assert 12 == again.num_cached


def test_an_evicted_answer_loses_its_end_first() -> None:
    """The same for the blocks of a sequence: they are freed from the end."""
    scheduler = _scheduler(num_blocks=3)
    group, _ = _group(8, Mode.RECEIVE, max_tokens=5)
    scheduler.add(group)
    scheduler.admit()
    scheduler.received(group)
    scheduler.fork(group, {0: 1})
    scheduler.release(group)
    other, _ = _group(5, Mode.PREFILL, first_token=40)
    scheduler.add(other)
    scheduler.admit()
    scheduler.release(other)
    again, _ = _group(8, Mode.RECEIVE)
    scheduler.add(again)
    scheduler.admit()
    assert 4 == again.num_cached


def test_choices_share_the_prompt_and_copy_only_its_partial_block() -> None:
    """Of three choices two copy the last block, and the third writes into the original."""
    scheduler = _scheduler()
    group, _ = _group(6, n=3)
    _compute_prompt(scheduler, group)
    first, partial = group.blocks
    scheduler.fork(group, {0: 1, 1: 2, 2: 3})
    step = scheduler.schedule()
    assert [partial, partial] == [source for source, _ in step.copies]
    assert [first] * 3 == [seq.table[0] for seq in step.decodes]
    targets = [target for _, target in step.copies]
    assert [*targets, partial] == [seq.table[1] for seq in step.decodes]
    assert [3, 1, 1, 1] == [scheduler.pool.owners(b) for b in (first, partial, *targets)]


def test_kv_that_was_not_waited_for_is_a_broken_invariant() -> None:
    """Only a group that receives can have received."""
    scheduler = _scheduler()
    group, _ = _group(4)
    scheduler.add(group)
    scheduler.admit()
    with pytest.raises(InvariantBroken, match="state prompt"):
        scheduler.received(group)


def test_a_deadline_ends_waiting_and_active_groups() -> None:
    """Expired groups are told once, and their blocks stay until release."""
    scheduler = _scheduler(limits=make_limits(max_num_seqs=1))
    active, waiting, patient = (_group(3, deadline=d) for d in (5.0, 5.0, 6.0))
    for group, _ in (active, waiting, patient):
        scheduler.add(group)
    scheduler.admit()
    assert 5.0 == scheduler.next_deadline()
    scheduler.expire(4.9)
    assert [State.PROMPT, State.WAITING] == [active[0].state, waiting[0].state]
    for _ in range(2):
        scheduler.expire(5.0)
    for _, events in (active, waiting):
        assert [DeadlineExceeded] == [type(e.error) for e in events if isinstance(e, Failed)]
    assert 1 == scheduler.pool.counts().live
    assert [patient[0]] == list(scheduler.waiting)


def test_a_wait_for_room_is_bounded() -> None:
    """A request that found no room in queue_timeout_s is refused as retryable; an admitted one is left alone."""
    scheduler = _scheduler(limits=make_limits(max_num_seqs=1, queue_timeout_s=3))
    active, waiting = _group(3), _group(3)
    for group, _ in (active, waiting):
        group.submitted_at = 2.0
        scheduler.add(group)
    scheduler.admit()
    assert 5.0 == scheduler.next_deadline()
    scheduler.expire(4.9)
    assert [waiting[0]] == list(scheduler.waiting)
    scheduler.expire(5.0)
    assert [Overloaded] == [type(e.error) for e in waiting[1] if isinstance(e, Failed)]
    assert State.PROMPT is active[0].state
    assert FOREVER == scheduler.next_deadline()


def test_an_ended_group_has_no_deadline() -> None:
    """Until its owner releases it, an expired group must not wake the engine again and again."""
    scheduler = _scheduler()
    group, _ = _group(3, deadline=5.0)
    scheduler.add(group)
    scheduler.admit()
    scheduler.expire(5.0)
    assert scheduler.next_deadline() is None


def test_release_is_idempotent_in_every_state() -> None:
    """A group may be released before it was queued, while it waits, while it runs, and again."""
    scheduler = _scheduler()
    unknown, _ = _group(3)
    waiting, _ = _group(3)
    scheduler.add(waiting)
    running, _ = _group(5, n=2, first_token=20)
    scheduler.add(running)
    scheduler.admit()
    scheduler.prompt_computed(Chunk(running, 0, 5))
    scheduler.fork(running, {0: 1, 1: 2})
    scheduler.schedule()
    for group in (unknown, waiting, running) * 2:
        scheduler.release(group)
        scheduler.pool.check_integrity()
    counts = scheduler.pool.counts()
    assert (0, 0) == (counts.live, counts.promised)
    assert scheduler.is_idle()

"""Who is let in, who is refused, and what ends a wait."""

from __future__ import annotations

from typing import Any

import pytest

from shared.engine.sequence import Failed, Group, Mode, State
from shared.engine.step import Chunk
from shared.errors import DeadlineExceeded, InvalidRequest, Overloaded, PromptTooLong
from tests.unit.shared.engine.helpers import VOCAB, make_limits, make_work
from tests.unit.shared.engine.scheduling import FOREVER, make_group, make_scheduler


def test_a_prompt_beyond_the_context_is_refused_in_words_that_clients_search_for() -> None:
    """Prompt plus answer are compared with the limit; exactly the limit fits."""
    scheduler = make_scheduler(limits=make_limits(max_model_len=20))
    scheduler.check(make_group(10, max_tokens=10)[0])
    with pytest.raises(
        PromptTooLong, match=r"maximum context length is 20 tokens.*21 tokens.*11 in the prompt"
    ):
        scheduler.check(make_group(11, max_tokens=10)[0])


@pytest.mark.parametrize(
    "sampling", [{"logit_bias": {VOCAB: 1.0}}, {"stop_token_ids": (VOCAB,)}], ids=["bias", "stop"]
)
def test_sampling_token_ids_outside_the_vocabulary_are_refused(sampling: dict[str, Any]) -> None:
    """An id that would index past the logits never reaches them."""
    with pytest.raises(InvalidRequest, match=f"below {VOCAB}"):
        make_scheduler().check(make_group(3, **sampling)[0])


def test_prompt_token_ids_outside_the_vocabulary_are_refused() -> None:
    """The first id past the end is refused, the last one inside is not."""
    scheduler = make_scheduler()
    scheduler.check(Group(make_work([VOCAB - 1]), Mode.LOCAL, FOREVER, print))
    with pytest.raises(InvalidRequest, match=f"below {VOCAB}"):
        scheduler.check(Group(make_work([VOCAB]), Mode.LOCAL, FOREVER, print))


def test_more_choices_than_can_ever_run_are_refused() -> None:
    """n is bounded by max_num_seqs."""
    with pytest.raises(InvalidRequest, match="at most 2 choices"):
        make_scheduler(limits=make_limits(max_num_seqs=2)).check(make_group(3, n=3)[0])


def test_a_request_that_needs_more_blocks_than_exist_is_refused() -> None:
    """What could wait for ever is said at once; what just fits is let in."""
    scheduler = make_scheduler(num_blocks=3, block_size=4)
    scheduler.check(make_group(8, max_tokens=5)[0])
    with pytest.raises(InvalidRequest, match="more KV memory"):
        scheduler.check(make_group(8, max_tokens=6)[0])


def test_a_full_queue_asks_to_come_back() -> None:
    """The refusal is retryable and says when."""
    scheduler = make_scheduler(limits=make_limits(max_queued=1))
    scheduler.add(make_group(3)[0])
    with pytest.raises(Overloaded) as caught:
        scheduler.check(make_group(3)[0])
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
    scheduler = make_scheduler()
    group, _ = make_group(num_tokens, mode, n=n, max_tokens=max_tokens)
    scheduler.add(group)
    scheduler.admit()
    counts = scheduler.pool.counts()
    assert wanted == counts.live + counts.promised


def test_admission_does_not_overtake() -> None:
    """A small request waits behind a large one that does not fit yet."""
    scheduler = make_scheduler(num_blocks=4)
    holder, large, small = (
        make_group(9, max_tokens=1),
        make_group(9, first_token=20),
        make_group(1, first_token=40),
    )
    for group, _ in (holder, large, small):
        scheduler.add(group)
    scheduler.admit()
    assert [True, False, False] == [bool(events) for _, events in (holder, large, small)]
    scheduler.release(holder[0])
    scheduler.admit()
    assert [large[0], small[0]] == scheduler.active


def test_choices_admitted_at_a_time_are_bounded() -> None:
    """A group counts with all of its choices until it is released."""
    scheduler = make_scheduler(limits=make_limits(max_num_seqs=3))
    (first, _), (second, _) = make_group(2, n=2), make_group(2, n=2)
    scheduler.add(first)
    scheduler.add(second)
    scheduler.admit()
    assert [first] == scheduler.active
    scheduler.release(first)
    scheduler.admit()
    assert [second] == scheduler.active


def test_a_deadline_ends_waiting_and_active_groups() -> None:
    """Expired groups are told once, and their blocks stay until release."""
    scheduler = make_scheduler(limits=make_limits(max_num_seqs=1))
    active, waiting, patient = (make_group(3, deadline=d) for d in (5.0, 5.0, 6.0))
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
    scheduler = make_scheduler(limits=make_limits(max_num_seqs=1, queue_timeout_s=3))
    active, waiting = make_group(3), make_group(3)
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


def test_a_step_that_takes_longer_than_a_wait_for_room_refuses_nobody() -> None:
    """Nobody looks at the queue during a step; who fits after it is admitted, however long ago it came."""
    scheduler = make_scheduler(limits=make_limits(max_num_seqs=1, queue_timeout_s=3))
    fits, waits = make_group(3), make_group(3)
    for group, _ in (fits, waits):
        group.submitted_at = 2.0
        scheduler.add(group)
    scheduler.expire(60.0)
    assert [fits[0]] == scheduler.active
    assert [Overloaded] == [type(e.error) for e in waits[1] if isinstance(e, Failed)]


def test_an_ended_group_has_no_deadline() -> None:
    """Until its owner releases it, an expired group must not wake the engine again and again."""
    scheduler = make_scheduler()
    group, _ = make_group(3, deadline=5.0)
    scheduler.add(group)
    scheduler.admit()
    scheduler.expire(5.0)
    assert scheduler.next_deadline() is None


def test_release_is_idempotent_in_every_state() -> None:
    """A group may be released before it was queued, while it waits, while it runs, and again."""
    scheduler = make_scheduler()
    unknown, _ = make_group(3)
    waiting, _ = make_group(3)
    scheduler.add(waiting)
    running, _ = make_group(5, n=2, first_token=20)
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

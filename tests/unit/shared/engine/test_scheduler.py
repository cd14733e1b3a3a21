"""What runs in a step, on which blocks, and what stays cached."""

from __future__ import annotations

import pytest

from shared.engine.sequence import Admitted, Mode
from shared.engine.step import Chunk
from shared.errors import InvariantBroken
from tests.unit.shared.engine.helpers import make_limits
from tests.unit.shared.engine.scheduling import compute_prompt, make_group, make_scheduler


def test_decodes_go_before_chunks_and_chunks_share_the_budget() -> None:
    """A step is one token of every running sequence, then prompts in order up to chunk_size tokens."""
    scheduler = make_scheduler(limits=make_limits(chunk_size=6))
    running, _ = make_group(3, n=2)
    compute_prompt(scheduler, running)
    scheduler.fork(running, {0: 5, 1: 6})
    prompts = [
        make_group(4, first_token=20)[0],
        make_group(9, first_token=30)[0],
        make_group(2, first_token=50)[0],
    ]
    for group in prompts:
        scheduler.add(group)
    scheduler.admit()
    step = scheduler.schedule()
    assert [0, 1] == [seq.choice for seq in step.decodes]
    assert [Chunk(prompts[0], 0, 4), Chunk(prompts[1], 0, 2)] == step.chunks
    assert [running, *prompts[:2]] == sorted(step.groups, key=scheduler.active.index)


def test_chunk_size_0_runs_one_whole_prompt_a_step() -> None:
    """Unchunked prefill takes prompts one by one."""
    scheduler = make_scheduler()
    first, second = make_group(9)[0], make_group(5, first_token=30)[0]
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
    scheduler = make_scheduler()
    first, _ = make_group(num_tokens)
    compute_prompt(scheduler, first)
    scheduler.release(first)
    again, events = make_group(num_tokens, mode)
    scheduler.add(again)
    scheduler.admit()
    assert [Admitted(cached, tuple(again.blocks))] == events
    assert [Chunk(again, cached, num_tokens)] == scheduler.schedule().chunks


@pytest.mark.parametrize(("num_tokens", "cached"), [(1, 0), (4, 4), (5, 4), (8, 8)])
def test_a_receiver_uses_every_cached_block(num_tokens: int, cached: int) -> None:
    """Who receives needs no logits of the prompt, so a full hit leaves nothing to send."""
    scheduler = make_scheduler()
    first, _ = make_group(num_tokens)
    compute_prompt(scheduler, first)
    scheduler.release(first)
    again, _ = make_group(num_tokens, Mode.RECEIVE)
    scheduler.add(again)
    scheduler.admit()
    assert cached == again.num_cached


def test_blocks_are_found_only_once_their_kv_is_there() -> None:
    """A prompt that was admitted, and one whose KV is still coming, share nothing yet."""
    scheduler = make_scheduler()
    for mode in (Mode.LOCAL, Mode.RECEIVE):
        scheduler.add(make_group(9, mode)[0])
    late, _ = make_group(9)
    scheduler.add(late)
    scheduler.admit()
    assert 0 == late.num_cached


def test_an_evicted_chain_loses_its_end_first() -> None:
    """A prefix whose first block is gone is worthless: one block of room must cost one block of hits."""
    scheduler = make_scheduler(num_blocks=4)
    first, _ = make_group(16, Mode.PREFILL)
    compute_prompt(scheduler, first)
    scheduler.release(first)
    other, _ = make_group(1, Mode.PREFILL, first_token=40)
    scheduler.add(other)
    scheduler.admit()
    scheduler.release(other)
    again, _ = make_group(16, Mode.PREFILL)
    scheduler.add(again)
    scheduler.admit()
    assert 12 == again.num_cached


def test_an_evicted_answer_loses_its_end_first() -> None:
    """The same for the blocks of a sequence: they are freed from the end."""
    scheduler = make_scheduler(num_blocks=3)
    group, _ = make_group(8, Mode.RECEIVE, max_tokens=5)
    scheduler.add(group)
    scheduler.admit()
    scheduler.received(group)
    scheduler.fork(group, {0: 1})
    scheduler.release(group)
    other, _ = make_group(5, Mode.PREFILL, first_token=40)
    scheduler.add(other)
    scheduler.admit()
    scheduler.release(other)
    again, _ = make_group(8, Mode.RECEIVE)
    scheduler.add(again)
    scheduler.admit()
    assert 4 == again.num_cached


def test_choices_share_the_prompt_and_copy_only_its_partial_block() -> None:
    """Of three choices two copy the last block, and the third writes into the original."""
    scheduler = make_scheduler()
    group, _ = make_group(6, n=3)
    compute_prompt(scheduler, group)
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
    scheduler = make_scheduler()
    group, _ = make_group(4)
    scheduler.add(group)
    scheduler.admit()
    with pytest.raises(InvariantBroken, match="state prompt"):
        scheduler.received(group)

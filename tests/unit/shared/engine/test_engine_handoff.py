"""The engine's two sides of a hand-off: prompts that are held, and prompts that are received."""

from __future__ import annotations

from collections.abc import Sequence

import pytest

from shared.engine.sequence import Admitted, Mode, State
from shared.errors import EngineFault
from shared.wire import Finish, First
from tests.unit.shared.engine.conftest import MakeEngine
from tests.unit.shared.engine.helpers import (
    VOCAB,
    Client,
    CountingRunner,
    GatedRunner,
    make_work,
    settle,
    tokens_of,
)

WINNER = VOCAB - 1


class Recorder:
    """What a sender is told."""

    is_amid_layers = False

    def __init__(self) -> None:
        self.told: list[object] = []

    def advance(self, num_computed: int) -> None:
        self.told.append(num_computed)

    def advance_layers(self, num_computed: int, num_layers: int) -> None:
        self.told.append((num_computed, num_layers))

    def finish(self, first_tokens: Sequence[int], finished: Sequence[bool]) -> None:
        self.told.append((list(first_tokens), list(finished)))

    def cancel(self, reason: str) -> None:
        self.told.append(reason)


def test_prefill_tells_the_sender_each_chunk_and_holds_the_blocks(make_engine: MakeEngine) -> None:
    """KV of finished chunks may travel at once; after the first token the blocks stay until release."""
    runner, sender = GatedRunner(), Recorder()
    engine = make_engine(runner, chunk_size=4)
    client = Client(make_work(range(10), num_choices=2), Mode.PREFILL, progress=sender)
    engine.submit(client.group)
    for told in ([], [4], [4, 8]):
        runner.step()
        assert told == sender.told
        runner.go()
    client.take(Admitted)
    assert [10, 10] == [token.token_id for token in client.take(First).tokens]
    settle(engine)
    assert [4, 8, 10, ([10, 10], [False, False])] == sender.told
    assert State.HELD is client.group.state
    assert 3 == engine.pool_counts.live
    engine.release(client.group)


def test_prefill_says_which_choices_their_first_token_ended(make_engine: MakeEngine) -> None:
    """Decode continues only the others."""
    sender = Recorder()
    engine = make_engine(CountingRunner(), eos=(WINNER,))
    work = make_work(range(5), num_choices=6, temperature=1.0, seed=3, logit_bias={str(WINNER): 4.0})
    client = Client(work, Mode.PREFILL, progress=sender)
    engine.submit(client.group)
    client.take(Admitted)
    tokens = client.take(First).tokens
    engine.release(client.group)
    settle(engine)
    finished = [token.finish_reason == "stop" for token in tokens]
    assert any(finished)
    assert not all(finished)
    assert ([token.token_id for token in tokens], finished) == sender.told[-1]


@pytest.mark.parametrize(("eos", "max_tokens", "reason"), [((5,), 50, "stop"), ((), 1, "length")])
def test_nothing_travels_when_the_first_token_ends_everything(
    make_engine: MakeEngine, eos: tuple[int, ...], max_tokens: int, reason: str
) -> None:
    """The sender is called off; the router sees the reason on the first token."""
    sender = Recorder()
    engine = make_engine(CountingRunner(), eos=eos)
    client = Client(make_work(range(5), max_tokens=max_tokens), Mode.PREFILL, progress=sender)
    engine.submit(client.group)
    client.take(Admitted)
    assert reason == client.take(First).tokens[0].finish_reason
    settle(engine)
    assert [5, "every choice ended with its first token"] == sender.told
    engine.release(client.group)


def test_decode_goes_on_from_the_received_first_tokens(make_engine: MakeEngine) -> None:
    """The first step feeds the first token at position num_prompt_tokens; nothing is sampled again."""
    runner = GatedRunner()
    engine = make_engine(runner)
    client = Client(make_work(range(8), num_choices=2, max_tokens=3), Mode.RECEIVE)
    engine.submit(client.group)
    assert 2 == len(client.take(Admitted).blocks)
    engine.received(client.group, {0: 40, 1: 50})
    step = runner.step()
    assert [(8, 40), (8, 50)] == [(s.num_computed, s.token_at(8)) for s in step.decodes]
    assert [] == step.chunks
    runner.open()
    events = client.rest()
    assert {0: [9, 10], 1: [9, 10]} == tokens_of(events)
    finish = events[-1]
    assert isinstance(finish, Finish)
    assert (0, 4) == (finish.prompt_tokens_computed, finish.output_tokens)
    engine.release(client.group)
    settle(engine)
    assert 0 == engine.counts.prompt_tokens_computed


def test_choices_that_ended_on_the_other_side_are_not_continued(make_engine: MakeEngine) -> None:
    """Only the choices with a first token to go on from get more."""
    engine = make_engine(CountingRunner())
    client = Client(make_work(range(6), num_choices=3), Mode.RECEIVE)
    engine.submit(client.group)
    client.take(Admitted)
    engine.received(client.group, {1: 40})
    assert {1: [7, 8, 9]} == tokens_of(client.rest())
    engine.release(client.group)


def test_a_hand_off_whose_choices_all_ended_finishes_at_once(make_engine: MakeEngine) -> None:
    """No step is run for it."""
    engine = make_engine(CountingRunner())
    client = Client(make_work(range(6), num_choices=3), Mode.RECEIVE)
    engine.submit(client.group)
    client.take(Admitted)
    engine.received(client.group, {})
    assert 0 == client.take(Finish).output_tokens
    engine.release(client.group)
    assert 0 == engine.counts.steps


def test_received_kv_is_found_by_the_next_request(make_engine: MakeEngine) -> None:
    """A later hand-off of the same prompt needs only what is not on a whole block."""
    engine = make_engine(CountingRunner())
    for cached in (0, 8):
        client = Client(make_work(range(10)), Mode.RECEIVE)
        engine.submit(client.group)
        assert cached == client.take(Admitted).cached_tokens
        engine.received(client.group, {0: 10})
        client.rest()
        engine.release(client.group)


def test_kv_that_was_quantised_is_not_found(make_engine: MakeEngine) -> None:
    """Neither the prompt's blocks nor those of the answer that follows; both used to pass for exact ones."""
    engine = make_engine(CountingRunner())
    client = Client(make_work(range(10), max_tokens=10), Mode.RECEIVE)
    engine.submit(client.group)
    client.take(Admitted)
    engine.received(client.group, {0: 10}, is_exact=False)
    assert {0: list(range(11, 20))} == tokens_of(client.rest())
    engine.release(client.group)

    turn = Client(make_work(range(22)), Mode.RECEIVE)
    engine.submit(turn.group)
    assert 0 == turn.take(Admitted).cached_tokens
    engine.release(turn.group)


def test_an_answer_is_found_by_the_next_turn(make_engine: MakeEngine) -> None:
    """Blocks that decoding filled are cached like those of a prompt."""
    engine = make_engine(CountingRunner())
    client = Client(make_work(range(3), max_tokens=10))
    engine.submit(client.group)
    client.rest()
    engine.release(client.group)
    turn = Client(make_work(range(20)), Mode.RECEIVE)
    engine.submit(turn.group)
    assert 12 == turn.take(Admitted).cached_tokens
    engine.release(turn.group)


def test_kv_that_comes_after_the_end_is_ignored(make_engine: MakeEngine) -> None:
    """Cancel and arrival may cross."""
    engine = make_engine(CountingRunner())
    client = Client(make_work(range(6)), Mode.RECEIVE)
    engine.submit(client.group)
    client.take(Admitted)
    engine.cancel(client.group)
    engine.received(client.group, {0: 6})
    settle(engine)
    assert client.events.empty()
    assert 2 == engine.pool_counts.live
    engine.release(client.group)


def test_stopped_choices_end_without_a_token(make_engine: MakeEngine) -> None:
    """The others go on; when the last one is stopped the request finishes."""
    runner = GatedRunner()
    engine = make_engine(runner)
    client = Client(make_work(range(3), num_choices=2, max_tokens=50))
    engine.submit(client.group)
    runner.step()
    runner.go()
    runner.step()
    engine.stop_choices(client.group, [0, 7])
    runner.go()
    assert [1] == [seq.choice for seq in runner.step().decodes]
    engine.stop_choices(client.group, [1])
    runner.open()
    made = tokens_of(client.rest())
    assert [3, 4] == made[0]
    assert [3, 4, 5] == made[1]
    engine.release(client.group)


def test_a_choice_stopped_before_its_kv_came_is_never_run(make_engine: MakeEngine) -> None:
    """The router may find a stop string in the first token, which overtakes the KV."""
    engine = make_engine(CountingRunner())
    client = Client(make_work(range(6), num_choices=2), Mode.RECEIVE)
    engine.submit(client.group)
    client.take(Admitted)
    engine.stop_choices(client.group, [0])
    engine.received(client.group, {0: 6, 1: 6})
    assert {1: [7, 8, 9]} == tokens_of(client.rest())
    engine.release(client.group)


def test_a_request_stopped_whole_before_its_kv_came_finishes_with_it(make_engine: MakeEngine) -> None:
    """No choice is left to run, so the arrival is the end."""
    engine = make_engine(CountingRunner())
    client = Client(make_work(range(6), num_choices=2), Mode.RECEIVE)
    engine.submit(client.group)
    client.take(Admitted)
    engine.stop_choices(client.group, [0, 1])
    engine.received(client.group, {0: 6, 1: 6})
    assert 0 == client.take(Finish).output_tokens
    engine.release(client.group)


def test_a_failing_step_leaves_reservations_alone(make_engine: MakeEngine) -> None:
    """A request whose KV is still on its way took no part."""
    runner = GatedRunner()
    engine = make_engine(runner)
    reserved, running = Client(make_work(range(6)), Mode.RECEIVE), Client(make_work([1]))
    for client in (reserved, running):
        engine.submit(client.group)
    runner.step()
    runner.go(RuntimeError("device lost"))
    assert EngineFault is type(running.error())
    runner.open()
    reserved.take(Admitted)
    engine.received(reserved.group, {0: 6})
    assert {0: [7, 8, 9]} == tokens_of(reserved.rest())
    for client in (reserved, running):
        engine.release(client.group)

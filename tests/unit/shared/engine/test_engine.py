"""The engine thread: order of events, cancelling at every point, deadlines."""

from __future__ import annotations

import itertools
import time
from typing import Any

import pytest

from shared.engine.engine import Engine
from shared.engine.sequence import Admitted, Mode
from shared.errors import DeadlineExceeded, InvalidRequest, Overloaded, PromptTooLong
from shared.wire import Finish, First, TokenOut
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


def _serve(engine: Engine, client: Client) -> dict[int, list[int]]:
    """Run a request to its end and release it."""
    engine.submit(client.group)
    events = client.rest()
    engine.release(client.group)
    return tokens_of(events)


@pytest.mark.parametrize("max_tokens", [1, 2, 3, 15, 16, 17, 64])
@pytest.mark.parametrize("n", [1, 3])
def test_exactly_max_tokens_are_made(make_engine: MakeEngine, max_tokens: int, n: int) -> None:
    """Never one too few or too many, for each choice, and they are the model's."""
    engine = make_engine(CountingRunner(), num_blocks=80)
    made = _serve(engine, Client(make_work(range(5), num_choices=n, max_tokens=max_tokens)))
    wanted = [(5 + i) % VOCAB for i in range(max_tokens)]
    assert dict.fromkeys(range(n), wanted) == made


def test_an_answer_may_fill_the_context(make_engine: MakeEngine) -> None:
    """The largest max_tokens that fits is served in full; one more is refused."""
    engine = make_engine(CountingRunner(), max_model_len=20)
    assert 15 == len(_serve(engine, Client(make_work(range(5), max_tokens=15)))[0])
    client = Client(make_work(range(5), max_tokens=16))
    engine.submit(client.group)
    assert PromptTooLong is type(client.error())
    engine.release(client.group)


def test_events_come_in_the_order_of_the_request_s_life(make_engine: MakeEngine) -> None:
    """Admitted, first, one list a step, finish; the last token alone has a finish reason."""
    engine = make_engine(CountingRunner())
    client = Client(make_work(range(6), num_choices=2, max_tokens=3))
    engine.submit(client.group)
    admitted, first, second, third, finish = client.rest()
    engine.release(client.group)
    assert isinstance(admitted, Admitted)
    assert 0 == admitted.cached_tokens
    assert isinstance(first, First)
    assert [TokenOut(choice=0, token_id=6), TokenOut(choice=1, token_id=6)] == first.tokens
    assert [TokenOut(choice=0, token_id=7), TokenOut(choice=1, token_id=7)] == second
    assert [TokenOut(choice=c, token_id=8, finish_reason="length") for c in (0, 1)] == third
    assert isinstance(finish, Finish)
    assert (0, 6, 6) == (finish.kv_bytes_received, finish.prompt_tokens_computed, finish.output_tokens)


def test_a_second_request_computes_only_what_is_not_cached(make_engine: MakeEngine) -> None:
    """Computed and cached add up to the prompt, in the event and in the counters."""
    engine = make_engine(CountingRunner())
    for cached in (0, 8):
        client = Client(make_work(range(10), max_tokens=1))
        engine.submit(client.group)
        client.take(Admitted)
        first = client.take(First)
        assert (cached, 10 - cached) == (first.cached_tokens, first.computed_tokens)
        assert 10 - cached == client.take(Finish).prompt_tokens_computed
        engine.release(client.group)
    settle(engine)
    assert (12, 8, 2) == (
        engine.counts.prompt_tokens_computed,
        engine.counts.prompt_tokens_cached,
        engine.counts.output_tokens,
    )


def test_an_end_token_ends_its_choice_with_stop(make_engine: MakeEngine) -> None:
    """The end token is the last one; with the first token it ends a request at once."""
    engine = make_engine(CountingRunner(), eos=(12,))
    for wanted in ([10, 11, 12], [12]):
        client = Client(make_work(range(wanted[0]), max_tokens=9))
        engine.submit(client.group)
        events = client.rest()
        engine.release(client.group)
        assert {0: wanted} == tokens_of(events)
        last = events[-2].tokens if isinstance(events[-2], First) else events[-2]
        assert isinstance(last, list)
        assert "stop" == last[-1].finish_reason


def test_ends_can_be_ignored_delayed_and_added(make_engine: MakeEngine) -> None:
    """ignore_eos goes on, min_tokens forbids the end until then, stop_token_ids are ends of their own."""
    engine = make_engine(CountingRunner(), eos=(6,))
    assert [5, 6, 7] == _serve(engine, Client(make_work(range(5), max_tokens=3, ignore_eos=True)))[0]
    assert 6 not in _serve(engine, Client(make_work(range(5), max_tokens=4, min_tokens=4)))[0]
    options: dict[str, Any] = {"max_tokens": 9, "ignore_eos": True, "stop_token_ids": (7,)}
    assert [5, 6, 7] == _serve(engine, Client(make_work(range(5), **options)))[0]


def test_a_resumed_request_goes_on_where_it_was(make_engine: MakeEngine) -> None:
    """Generated tokens that come in count against max_tokens and keep their positions and choice."""
    engine = make_engine(CountingRunner())
    work = make_work(range(9), num_prompt_tokens=6, max_tokens=5).model_copy(update={"first_choice": 2})
    assert {2: [9, 10]} == _serve(engine, Client(work))


def test_requests_in_one_batch_do_not_mix(make_engine: MakeEngine) -> None:
    """Chunked prompts and decodes of many requests run together; each gets its own tokens."""
    engine = make_engine(CountingRunner(), num_blocks=200, chunk_size=3)
    clients = [Client(make_work(range(n, n + 11 - n), max_tokens=9)) for n in range(1, 9)]
    for client in clients:
        engine.submit(client.group)
    for client in clients:
        start = len(client.group.token_ids)
        assert {0: list(range(start, start + 9))} == tokens_of(client.rest())
        engine.release(client.group)


@pytest.mark.parametrize("mode", [Mode.LOCAL, Mode.PREFILL])
@pytest.mark.parametrize("end", ["cancel", "release", "both"])
@pytest.mark.parametrize("num_steps", range(6))
def test_a_request_can_end_at_any_step(make_engine: MakeEngine, mode: Mode, end: str, num_steps: int) -> None:
    """Ended inside its n-th step, or after its end, a request leaves nothing, and its neighbour goes on."""
    runner = GatedRunner()
    engine = make_engine(runner, chunk_size=4)
    neighbour = Client(make_work(range(20, 22), max_tokens=40))
    engine.submit(neighbour.group)
    runner.step()
    client = Client(make_work(range(9), num_choices=2, max_tokens=3), mode)
    engine.submit(client.group)
    for _ in range(num_steps):
        runner.go()
        runner.step()
    if end in ("cancel", "both"):
        engine.cancel(client.group)
    if end in ("release", "both"):
        engine.release(client.group)
    runner.open()
    assert list(range(2, 42)) == tokens_of(neighbour.rest())[0]
    for group in (client.group, neighbour.group):
        engine.release(group)


def test_a_request_cancelled_before_it_was_read_is_never_admitted(make_engine: MakeEngine) -> None:
    """Its messages may lie behind a long step."""
    runner = GatedRunner()
    engine = make_engine(runner)
    busy, client = Client(make_work(range(3), max_tokens=2)), Client(make_work(range(3)))
    engine.submit(busy.group)
    runner.step()
    engine.submit(client.group)
    engine.cancel(client.group)
    runner.open()
    busy.rest()
    engine.release(busy.group)
    settle(engine)
    assert client.events.empty()
    engine.release(client.group)


def test_refusals_are_delivered_and_still_want_a_release(make_engine: MakeEngine) -> None:
    """A refused request counts until it is released, and holds nothing."""
    engine = make_engine(CountingRunner(), max_queued=1, max_num_seqs=1)
    client = Client(make_work([VOCAB]))
    engine.submit(client.group)
    assert InvalidRequest is type(client.error())
    assert 1 == engine.num_groups
    engine.release(client.group)
    engine.release(client.group)


def test_the_queue_is_bounded(make_engine: MakeEngine) -> None:
    """What does not fit into queue and pool is told so at once."""
    runner = GatedRunner()
    engine = make_engine(runner, max_queued=1, max_num_seqs=1)
    running, waiting, refused = (Client(make_work(range(3), max_tokens=1)) for _ in range(3))
    engine.submit(running.group)
    runner.step()
    engine.submit(waiting.group)
    engine.submit(refused.group)
    runner.open()
    assert Overloaded is type(refused.error())
    running.rest()
    engine.release(running.group)
    waiting.rest()
    for client in (waiting, refused):
        engine.release(client.group)


def test_a_deadline_wakes_the_idle_engine(make_engine: MakeEngine) -> None:
    """A reservation whose KV never comes is ended by its deadline, without any message."""
    now = [0.0]  # stands still until it is admitted, however late the engine's thread is
    engine = make_engine(CountingRunner(), clock=lambda: now[0])
    client = Client(make_work(range(3)), Mode.RECEIVE, deadline=0.02)
    engine.submit(client.group)
    client.take(Admitted)
    now[0] = 1.0
    assert DeadlineExceeded is type(client.error())
    engine.release(client.group)


def test_expired_work_is_dropped_before_it_is_computed(make_engine: MakeEngine) -> None:
    """A request whose deadline has passed in the queue costs no step."""
    engine = make_engine(CountingRunner())
    client = Client(make_work(range(3)), deadline=time.monotonic())
    engine.submit(client.group)
    assert DeadlineExceeded is type(client.error())
    engine.release(client.group)
    assert 0 == engine.counts.steps


def test_time_in_the_inbox_is_queue_time(make_engine: MakeEngine) -> None:
    """The stages start when the request is submitted, not when a long step lets the engine read it."""
    ticks = itertools.count()
    runner = GatedRunner()
    engine = make_engine(runner, clock=lambda: float(next(ticks)))
    busy, client = (Client(make_work([t]), deadline=1e9) for t in (1, 2))
    engine.submit(busy.group)
    runner.step()
    engine.submit(client.group)
    for _ in range(1000):
        next(ticks)
    runner.open()
    busy.rest()
    client.take(Admitted)
    assert client.take(First).queue_s > 1000
    for group in (busy.group, client.group):
        engine.release(group)

"""What a course takes over of a worker's events, without any worker."""

from __future__ import annotations

from time import perf_counter

import pytest

from router.course import Course, Job
from router.legs import AnyLeg, Inbox, Leg, LegFailed
from router.workers.state import Worker
from router.workers.stream import EventStream
from shared.wire import DecodeEvent, Sampling, TokenOut

GROUP = range(2)


class Taken:
    """A course of two choices of three tokens each at the longest, and what came out of it."""

    def __init__(self) -> None:
        self.tokens: list[tuple[int, int]] = []
        job = Job(
            request_id="req-test",
            token_ids=[1, 2],
            num_choices=len(GROUP),
            sampling=Sampling(max_tokens=3),
            timeout_s=60.0,
            started=perf_counter(),
        )
        self.course = Course(job, max_tries=2, emit=self._emit, done=lambda: None)

    def resumed_from(self, choice: int) -> list[int]:
        """What the next try of a choice would send."""
        return self.course.decode_request(range(choice, choice + 1), "r", local=False).token_ids

    def _emit(self, tokens: list[TokenOut]) -> None:
        self.tokens += [(token.choice, token.token_id) for token in tokens]


def leg() -> AnyLeg:
    """One that is only to blame."""

    def closed(_: object) -> EventStream[DecodeEvent]:
        raise NotImplementedError

    worker = Worker("decode", "http://w", lambda: None)
    return Leg(worker, tokens=0, open_stream=closed, inbox=Inbox())


def out(choice: int, token_id: int, *, is_last: bool = False) -> TokenOut:
    """A token of a choice."""
    return TokenOut(choice=choice, token_id=token_id, finish_reason="stop" if is_last else None)


@pytest.mark.parametrize(
    "bad",
    [[out(7, 5)], [out(1, 5), out(1, 6), out(1, 7)]],
    ids=["foreign choice", "last token without saying so"],
)
def test_an_event_that_is_half_valid_is_taken_not_at_all(bad: list[TokenOut]) -> None:
    """Its valid token once counted as given out: the client never got it, and the retry went on behind it."""
    taken = Taken()
    taken.course.tokens(leg(), GROUP, [out(0, 3), out(1, 3)])
    with pytest.raises(LegFailed):
        taken.course.tokens(leg(), GROUP, [out(0, 4), *bad])
    assert [(0, 3), (1, 3)] == taken.tokens
    assert [[1, 2, 3], [1, 2, 3]] == [taken.resumed_from(choice) for choice in GROUP]
    assert 2 == taken.course.report.completion_tokens


def test_tokens_of_ended_choices_are_dropped() -> None:
    """Whether the choice ended before, in the same event, or by the client's stop string."""
    taken = Taken()
    taken.course.tokens(leg(), GROUP, [out(0, 3, is_last=True), out(0, 4), out(1, 3)])
    taken.course.tokens(leg(), GROUP, [out(0, 5), out(1, 4)])
    assert taken.course.stop(1)
    taken.course.tokens(leg(), GROUP, [out(1, 5), out(1, 6)])
    assert [(0, 3), (1, 3), (1, 4)] == taken.tokens
    assert [] == taken.course.unfinished(GROUP)

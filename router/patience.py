"""How long a try waits for the next event: its stage's limit, and after the last token a short one in all."""

from __future__ import annotations

from time import perf_counter

from router.course import Course

LAST_WORDS_S = 1.0
"""How long after the last token of an answer the workers may take for what they measured."""


class Patience:
    """Of one try for one group of choices. After the last token each event gets what is left, not a fresh limit."""

    def __init__(self, course: Course, group: range) -> None:
        self._course = course
        self._group = group
        self._until: float | None = None

    @property
    def is_answered(self) -> bool:
        """Are all tokens there? Then what fails is only bookkeeping: the router's own measures do."""
        return not self._course.unfinished(self._group)

    def left_s(self, stage_s: float) -> float:
        """Seconds for the next event of a stage that may take `stage_s`; none are left at 0 or below."""
        if not self.is_answered:
            return stage_s
        now = perf_counter()
        if self._until is None:
            self._until = now + LAST_WORDS_S
        return self._until - now

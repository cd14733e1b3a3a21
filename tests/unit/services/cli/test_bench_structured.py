"""The judge of constrained answers: pydantic's word on each, and a count of every outcome."""

from __future__ import annotations

import json
from typing import Any

import httpx
import pytest

from router.openai.structured import json_schema
from services.cli.bench_structured import Case, Job, Tally, cases
from shared.grammar import problem


def choice(content: str, reason: str = "stop") -> dict[str, Any]:
    """One choice of a chat answer."""
    return {"finish_reason": reason, "message": {"content": content}}


@pytest.mark.parametrize("case", cases(), ids=lambda case: case.name)
def test_every_case_can_be_enforced(case: Case) -> None:
    """A schema that a server must refuse would measure nothing."""
    assert problem(json_schema(case.form.json_schema(), "x").grammar) is None


@pytest.mark.parametrize(
    ("answer", "outcome"),
    [(choice("1"), "right"), (choice("2"), "wrong"), (choice("1", "length"), "cut")],
)
def test_every_answer_is_judged(answer: dict[str, Any], outcome: str) -> None:
    """What was cut by length is neither right nor wrong."""
    job = Job("x", lambda: answer, lambda found: found["message"]["content"] == "1")

    assert outcome == job.run()[1]


def test_a_refusal_is_counted_and_shown() -> None:
    """One answer that fails does not end the measurement."""

    def refuse() -> dict[str, Any]:
        response = httpx.Response(504, request=httpx.Request("POST", "http://x"))
        response.raise_for_status()
        return {}

    tally = Tally()
    tally.add(*Job("x", refuse, bool).run())

    assert {"x": {"failed": 1}} == tally.to_dict()["counts"]
    assert "504" in tally.wrong[0]
    json.dumps(tally.to_dict())

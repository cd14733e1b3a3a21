"""`handoff bench structured`: does a running server keep its word about schemas and required tool calls?

Every answer is read by pydantic, which knows nothing of the grammar that made it. Prompts say what is wanted but
not in which form, and the temperature is 1, so nothing but the constraint makes an answer right.
"""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Annotated, Any, Literal

import httpx
from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError
from rich.console import Console
from rich.table import Table

Outcome = Literal["right", "cut", "wrong", "failed"]


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid")


class _Address(_Strict):
    street: str = Field(max_length=40)
    number: int = Field(ge=1, le=999)


class _Person(_Strict):
    name: str = Field(max_length=30)
    age: int = Field(ge=0, le=120)
    address: _Address
    email: str | None = Field(max_length=40)


class _Tree(_Strict):
    value: int = Field(ge=0, le=99)
    children: list[_Tree] = Field(max_length=2)


class _Circle(_Strict):
    kind: Literal["circle"]
    radius: float = Field(ge=0, le=10)


class _Square(_Strict):
    kind: Literal["square"]
    side: float = Field(ge=0, le=10)


class _Weather(_Strict):
    city: str = Field(max_length=30)
    unit: Literal["celsius", "fahrenheit"]
    days: int = Field(ge=1, le=7)


class _Search(_Strict):
    words: list[Annotated[str, Field(max_length=20)]] = Field(min_length=1, max_length=4)


@dataclass(frozen=True, slots=True)
class Case:
    """A form and a prompt that calls for something of the kind."""

    name: str
    form: TypeAdapter[Any]
    prompt: str


def cases() -> list[Case]:
    """Enums, nesting, arrays, unions, recursion, unicode, numbers."""
    colours = Literal["red", "grün", "青い", 'with "quotes"']
    small = list[Annotated[int, Field(ge=-1000, le=1000)]]
    return [
        Case("enum", TypeAdapter(colours), "Which colour is the sky?"),
        Case("nested object", TypeAdapter(_Person), "Invent a person who lives in Paris."),
        Case("array", TypeAdapter(Annotated[small, Field(max_length=8)]), "Give me five numbers."),
        Case("union", TypeAdapter(_Circle | _Square), "Draw a shape of size three."),
        Case("recursion", TypeAdapter(_Tree), "Make a small binary tree."),
        Case("numbers", TypeAdapter(Annotated[float, Field(ge=0, le=1)]), "How likely is rain?"),
        Case("unicode", TypeAdapter(Annotated[str, Field(max_length=20)]), "用中文说你好。"),
        Case("nullable", TypeAdapter(bool | None), "Is this sentence true?"),
        Case(
            "array of objects", TypeAdapter(Annotated[list[_Address], Field(max_length=3)]), "Two addresses."
        ),
    ]


_TOOLS: dict[str, type[BaseModel]] = {"get_weather": _Weather, "search": _Search}
_TOOL_PROMPTS = ("Hello, how are you?", "What is the weather in Rome and in Oslo?", "Tell me a joke.", "Bye!")


@dataclass(frozen=True, slots=True)
class Server:
    """Where requests go."""

    url: str
    model: str | None
    api_key: str | None
    max_tokens: int
    timeout_s: float = 600.0

    def ask(self, prompt: str, seed: int, **fields: Any) -> dict[str, Any]:
        """The only choice of an answer. Raises httpx.HTTPError."""
        body = {
            "messages": [{"role": "user", "content": prompt}],
            "temperature": 1.0,
            "top_p": 1.0,
            "top_k": -1,
            "repetition_penalty": 1.0,
            "max_tokens": self.max_tokens,
            "seed": seed,
            **fields,
        }
        headers = {} if self.api_key is None else {"Authorization": f"Bearer {self.api_key}"}
        response = httpx.post(
            f"{self.url}/v1/chat/completions",
            json=body if self.model is None else body | {"model": self.model},
            headers=headers,
            timeout=self.timeout_s,
            trust_env=False,
        )
        response.raise_for_status()
        choice: dict[str, Any] = response.json()["choices"][0]
        return choice


@dataclass(frozen=True, slots=True)
class Job:
    """One request, and the judge of its choice."""

    name: str
    ask: Callable[[], dict[str, Any]]
    is_right: Callable[[dict[str, Any]], bool]

    def run(self) -> tuple[str, Outcome, str]:
        """What came of it, and the answer or the failure to show."""
        try:
            choice = self.ask()
        except httpx.HTTPStatusError as exc:
            return self.name, "failed", str(exc)
        shown = json.dumps(choice["message"], ensure_ascii=False)
        if choice["finish_reason"] == "length":
            return self.name, "cut", shown
        return self.name, "right" if self.is_right(choice) else "wrong", shown


@dataclass(slots=True)
class Tally:
    """Outcomes by what was asked for, and what was wrong. failed: the server gave no answer, such as too late."""

    counts: dict[str, Counter[Outcome]] = field(default_factory=dict)
    wrong: list[str] = field(default_factory=list)

    def add(self, name: str, outcome: Outcome, shown: str) -> None:
        """Count one answer."""
        self.counts.setdefault(name, Counter())[outcome] += 1
        if outcome in ("wrong", "failed"):
            self.wrong.append(f"{name}: {shown[:200]}")

    def to_dict(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "counts": {name: dict(count) for name, count in self.counts.items()},
            "wrong": self.wrong[:10],
        }


def measure_structured(server: Server, *, runs: int, calls: int, concurrency: int, seed: int) -> Tally:
    """`runs` answers over all schemas in turn, then `calls` answers that must call a tool."""
    forms = cases()
    jobs = [_schema_job(server, forms[run % len(forms)], seed + run) for run in range(runs)]
    prompts = _TOOL_PROMPTS
    jobs += [_call_job(server, prompts[run % len(prompts)], seed + run) for run in range(calls)]
    tally = Tally()
    with ThreadPoolExecutor(concurrency) as threads:
        for name, outcome, shown in threads.map(Job.run, jobs):
            tally.add(name, outcome, shown)
    return tally


def print_structured(console: Console, tally: Tally) -> None:
    """A table of outcomes, and what was wrong."""
    title = "constrained answers at temperature 1"
    table = Table("asked for", "right", "cut by length", "wrong", "no answer", title=title)
    for name, count in tally.counts.items():
        table.add_row(name, *(str(count[outcome]) for outcome in ("right", "cut", "wrong", "failed")))
    console.print(table)
    for line in tally.wrong[:10]:
        console.print(line, style="red", markup=False)


def _schema_job(server: Server, case: Case, seed: int) -> Job:
    schema = case.form.json_schema()
    wanted = {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}

    def judge(choice: dict[str, Any]) -> bool:
        return choice["finish_reason"] == "stop" and _reads(case.form, choice["message"]["content"] or "")

    return Job(case.name, partial(server.ask, case.prompt, seed, response_format=wanted), judge)


def _call_job(server: Server, prompt: str, seed: int) -> Job:
    tools = [
        {"type": "function", "function": {"name": name, "parameters": model.model_json_schema()}}
        for name, model in _TOOLS.items()
    ]

    def judge(choice: dict[str, Any]) -> bool:
        return choice["finish_reason"] == "tool_calls" and _are_calls(choice["message"]["tool_calls"])

    ask = partial(server.ask, prompt, seed, tools=tools, tool_choice="required")
    return Job("required call", ask, judge)


def _are_calls(made: Sequence[dict[str, Any]]) -> bool:
    functions = [call["function"] for call in made]
    return bool(made) and all(
        f["name"] in _TOOLS and _reads(TypeAdapter(_TOOLS[f["name"]]), f["arguments"]) for f in functions
    )


def _reads(form: TypeAdapter[Any], content: str) -> bool:
    try:
        form.validate_json(content)
    except ValidationError:
        return False
    return True

"""A stock agent library: its own loop calls a tool twice and then answers, over either API, in either mode."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any, Literal

import pytest
from agents import (
    Agent,
    AgentHooks,
    Model,
    ModelSettings,
    OpenAIChatCompletionsModel,
    OpenAIResponsesModel,
    RunConfig,
    Runner,
    RunResult,
    RunResultStreaming,
    Tool,
    ToolCallOutputItem,
    function_tool,
)
from openai import AsyncOpenAI
from pydantic import BaseModel

from tests.support.cluster import Cluster

QUESTION = "Which city is warmer, Rome or Oslo?"
UNTRACED = RunConfig(tracing_disabled=True)

City = Literal["Rome", "Oslo"]
Unit = Literal["celsius", "fahrenheit"]


class Verdict(BaseModel):
    """The answer, so that a model of random weights comes to an end."""

    warmer: City


class EnoughCalls(AgentHooks[Any]):
    """Leaves the model no choice: a call for as long as there were fewer than two, then none."""

    def __init__(self) -> None:
        self.num_calls = 0

    async def on_tool_end(self, _context: Any, agent: Agent[Any], _tool: Tool, _result: object) -> None:
        """See AgentHooks."""
        self.num_calls += 1
        if self.num_calls == 2:
            agent.model_settings = replace(agent.model_settings, tool_choice="none")


@function_tool
def get_temperature(city: City, unit: Unit) -> str:
    """Degrees of one city."""
    return f"{10 + len(city)} degrees {unit} in {city}"


def weather_agent(model: Model) -> Agent[Any]:
    """One run's agent."""
    return Agent(
        name="weather",
        instructions="You answer questions about the weather.",
        model=model,
        model_settings=ModelSettings(
            temperature=0, max_tokens=100, tool_choice="required", parallel_tool_calls=False
        ),
        tools=[get_temperature],
        output_type=Verdict,
        hooks=EnoughCalls(),
        reset_tool_choice=False,
    )


@pytest.fixture(params=["pd", "unified"])
def cluster(request: pytest.FixtureRequest) -> Cluster:
    """Either mode."""
    found: Cluster = request.getfixturevalue(request.param)
    return found


@pytest.fixture(params=[OpenAIChatCompletionsModel, OpenAIResponsesModel])
async def model(request: pytest.FixtureRequest, cluster: Cluster) -> AsyncIterator[Model]:
    """Either API."""
    async with AsyncOpenAI(base_url=f"{cluster.url}/v1", api_key="any", max_retries=0) as client:
        yield request.param(model="tiny", openai_client=client)


def outputs(result: RunResult | RunResultStreaming) -> list[Any]:
    """What the tool said, in order."""
    return [item.output for item in result.new_items if isinstance(item, ToolCallOutputItem)]


async def test_two_calls_then_an_answer(model: Model) -> None:
    """Whole answers: arguments are what their schema asks for, and the last turn is the answer."""
    result = await Runner.run(weather_agent(model), QUESTION, run_config=UNTRACED)

    assert 2 == len(outputs(result))
    assert all(re.fullmatch(r"14 degrees \w+ in (Rome|Oslo)", output) for output in outputs(result))
    assert isinstance(result.final_output, Verdict)


async def test_the_streamed_loop_comes_to_the_same(model: Model) -> None:
    """Calls and answer, put together from events."""
    streamed = Runner.run_streamed(weather_agent(model), QUESTION, run_config=UNTRACED)
    async for _ in streamed.stream_events():
        pass

    whole = await Runner.run(weather_agent(model), QUESTION, run_config=UNTRACED)

    assert outputs(whole) == outputs(streamed)
    assert whole.final_output == streamed.final_output

"""locust users that stream completions and report what a streaming user feels.

    locust -f loadtest/locustfile.py --headless -u 4 -r 4 -t 20s --host http://127.0.0.1:8000

Besides the request itself (POST, its time is E2EL), each success reports TTFT, every ITL, TPOT, and one
`stage:<name>` per stage that the server told of, all in milliseconds. They show as request types of their
own, so locust's "Aggregated" line mixes them and says nothing. Options also come from LOADTEST_* variables.

locust patches the standard library for gevent when it starts, so nothing but locust itself may import this
file.
"""

from __future__ import annotations

import itertools
import random
import time
from collections.abc import Iterator
from http import HTTPStatus
from typing import Any

from locust import FastHttpUser, User, events, task
from locust.argument_parser import LocustArgumentParser
from locust.contrib.fasthttp import FAILURE_EXCEPTIONS, ResponseContextManager
from locust.env import Environment
from locust.exception import StopUser

from loadtest.client import Request
from loadtest.measure import StreamMeasurement
from loadtest.metrics import RequestRecord
from loadtest.traces import Scale, find, read
from loadtest.workload import replay, synthetic


class RequestFailed(Exception):
    """A request that was no success; locust groups failures by this text."""


@events.init_command_line_parser.add_listener  # type: ignore[untyped-decorator]
def add_options(parser: LocustArgumentParser, **_: object) -> None:
    """Called by locust before it reads its command line."""
    group = parser.add_argument_group("Completions")

    def add(flag: str, kind: type, default: object, text: str) -> None:
        variable = "LOADTEST_" + flag.removeprefix("--").replace("-", "_").upper()
        group.add_argument(flag, type=kind, default=default, env_var=variable, help=text)

    add("--model", str, "", "Model name in requests; empty asks the server for its first one")
    add("--api-key", str, "", "Sent as a bearer token if set")
    add("--prompt-tokens", int, 128, "Prompt length in tokens")
    add("--max-tokens", int, 32, "Output length in tokens")
    add("--seed", int, 0, "Seed of prompts")
    add(
        "--requests",
        int,
        0,
        "End the run after so many requests; 0 goes on until -t, or the end of the trace",
    )
    add("--trace", str, "", "Replay azure-conv, azure-code, mooncake, or a trace file")
    add("--time-scale", float, 1.0, "Multiplies the arrival times of the trace")
    add("--length-scale", float, 1.0, "Multiplies the lengths of the trace")
    add("--pause-min", float, 0.0, "Shortest pause of a user between two requests, in seconds")
    add(
        "--pause-max",
        float,
        0.0,
        "Longest pause; 4.8 to 5.2 s meets servers that hang up at 5 s",
    )


class Workload:
    """Hands requests to all users of this process, each once. gevent switches only on I/O: no lock needed."""

    def __init__(self, options: Any) -> None:
        limit = options.requests or None
        if options.trace:
            scale = Scale(options.time_scale, options.length_scale)
            planned = replay(read(find(options.trace), limit=limit), scale, seed=options.seed)
            self._source: Iterator[tuple[float | None, Request]] = (
                (item.due_s, item.request) for item in planned.requests
            )
        else:
            requests = synthetic(
                prompt_tokens=options.prompt_tokens, max_tokens=options.max_tokens, seed=options.seed
            )
            self._source = zip(itertools.repeat(None), itertools.islice(requests, limit), strict=False)
        self._started_s = time.monotonic()
        self.users: set[User] = set()
        self.ended = False

    def take(self) -> tuple[float, Request] | None:
        """Seconds until the next request is due, and the request; None when all were sent."""
        due_s, request = next(self._source, (None, None))
        if request is None:
            self.ended = True
            return None
        return (0.0 if due_s is None else max(0.0, self._started_s + due_s - time.monotonic())), request


@events.test_start.add_listener  # type: ignore[untyped-decorator]
def share_workload(environment: Environment, **_: object) -> None:
    """One workload per run, held by that run's environment. Each locust process replays a trace."""
    environment.workload = Workload(environment.parsed_options)  # type: ignore[attr-defined]


class CompletionUser(FastHttpUser):
    """Streams one completion after another, each to its end."""

    network_timeout = 600.0

    def on_start(self) -> None:
        """Learn which model to name. A server that tells none ends the user."""
        options: Any = self.environment.parsed_options
        self._workload: Workload = self.environment.workload
        self._workload.users.add(self)
        self._headers = {"Authorization": f"Bearer {options.api_key}"} if options.api_key else {}
        self._pause_s = (options.pause_min, max(options.pause_min, options.pause_max))
        self._model: str = options.model or self._first_model()

    def on_stop(self) -> None:
        """The last user to find nothing more to send ends the run; no need to guess its length for `-t`."""
        self._workload.users.discard(self)
        if self._workload.ended and not self._workload.users and self.environment.runner is not None:
            self.environment.runner.quit()

    def wait_time(self) -> float:
        """Pause between two requests."""
        return random.uniform(*self._pause_s)

    @task
    def complete(self) -> None:
        """Send the next request when it is due, and report what it measured."""
        taken = self._workload.take()
        if taken is None:
            raise StopUser
        due_in_s, request = taken
        time.sleep(due_in_s)  # gevent's, by locust's patch: other users go on
        self._stream(request)

    def _first_model(self) -> str:
        with self.client.get("/v1/models", headers=self._headers, catch_response=True) as response:
            if response.status_code == HTTPStatus.OK and (models := response.json().get("data")):
                response.success()
                return str(models[0]["id"])
            response.failure(RequestFailed(f"no model to name: status {response.status_code}"))
        raise StopUser

    def _stream(self, request: Request) -> None:
        measurement = StreamMeasurement(time.monotonic())
        with self.client.post(
            request.path,
            json=request.body(self._model),
            headers={**self._headers, "Accept": "text/event-stream", "Accept-Encoding": "identity"},
            stream=True,
            catch_response=True,
        ) as response:
            record = _measured(response, measurement)
            took_s = record.e2el_s or record.ended_s - record.started_s
            response.request_meta["response_time"] = took_s * 1000
            response.request_meta["response_length"] = len(record.text.encode())
            if record.failure is not None:
                response.failure(RequestFailed(f"{record.failure.kind}: {record.failure.detail}"))
                return
            response.success()
        for request_type, value_s in _metrics(record):
            self.environment.events.request.fire(
                request_type=request_type,
                name=request.path,
                response_time=value_s * 1000,
                response_length=0,
                exception=None,
                context={},
            )


def _measured(response: ResponseContextManager, measurement: StreamMeasurement) -> RequestRecord:
    """Read the answer as it comes in: `readline` returns at each line, `iter_content` would wait for more."""
    try:
        if response.status_code == 0:
            return measurement.fail("connect", str(getattr(response, "error", "")), time.monotonic())
        if response.status_code != HTTPStatus.OK:
            kind = f"status_{response.status_code}"
            return measurement.fail(kind, str(response.text)[:500], time.monotonic())
        measurement.headers((str(name), str(value)) for name, value in (response.headers or {}).items())
        while line := response.stream.readline(b"\n"):
            measurement.feed(line, time.monotonic())
    except FAILURE_EXCEPTIONS as exc:
        return measurement.fail("cut_stream", f"{type(exc).__name__}: {exc}", time.monotonic())
    return measurement.end(time.monotonic())


def _metrics(record: RequestRecord) -> Iterator[tuple[str, float]]:
    """Request type and seconds of everything that a success reports."""
    for name, value_s in (("TTFT", record.ttft_s), ("TPOT", record.tpot_s)):
        if value_s is not None:
            yield name, value_s
    for gap_s in record.itl_s:
        yield "ITL", gap_s
    for stage, stage_s in record.timing.stages_s.items():
        yield f"stage:{stage}", stage_s

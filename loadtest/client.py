"""A streaming client for /v1/completions and /v1/chat/completions that measures each request.

Any server that speaks the OpenAI API will do; ours tells its stage times as well. What the server or the
network
did to a request never raises: it is in the RequestRecord that comes back.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from types import TracebackType

import httpx

from loadtest.measure import StreamMeasurement
from loadtest.metrics import RequestRecord

COMPLETIONS = "/v1/completions"
CHAT = "/v1/chat/completions"


@dataclass(frozen=True, slots=True)
class Request:
    """One request to send. prompt: token ids (exact length), or text; chat takes text only.

    extra: more body fields, laid over the ones made here.
    """

    prompt: tuple[int, ...] | str
    max_tokens: int
    chat: bool = False
    extra: Mapping[str, object] = field(default_factory=dict)

    @property
    def path(self) -> str:
        """Where it is posted."""
        return CHAT if self.chat else COMPLETIONS

    def body(self, model: str) -> dict[str, object]:
        """Greedy, streamed, with usage, exactly max_tokens tokens: what makes runs comparable."""
        if self.chat:
            if not isinstance(self.prompt, str):
                raise ValueError("a chat request needs text, not token ids")
            prompt: dict[str, object] = {"messages": [{"role": "user", "content": self.prompt}]}
        else:
            prompt = {"prompt": self.prompt if isinstance(self.prompt, str) else list(self.prompt)}
        return {
            "model": model,
            **prompt,
            "max_tokens": self.max_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
            **self.extra,
        }


class LoadClient:
    """Sends requests over one connection pool. Use as an async context manager."""

    def __init__(
        self,
        base_url: str,
        *,
        model: str | None = None,
        api_key: str | None = None,
        timeout_s: float = 600.0,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """model: None asks the server for its first one. timeout_s: longest silence that is borne."""
        self._model = model
        self._clock = clock
        # NOTE: no proxy from the environment (it would be measured too), no pool limit (it would queue in
        # here), and idle connections are dropped before a server with the usual 5 s keep-alive can drop
        # them.
        self._http = httpx.AsyncClient(
            base_url=base_url,
            headers={"Authorization": f"Bearer {api_key}"} if api_key else {},
            timeout=httpx.Timeout(timeout_s, connect=10.0),
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=None, keepalive_expiry=2.0),
            trust_env=False,
        )

    async def __aenter__(self) -> LoadClient:
        await self._http.__aenter__()
        return self

    async def __aexit__(
        self, kind: type[BaseException] | None, exc: BaseException | None, trace: TracebackType | None
    ) -> None:
        await self._http.__aexit__(kind, exc, trace)

    def now_s(self) -> float:
        """The clock of every record that this client makes."""
        return self._clock()

    async def model(self) -> str:
        """The model that requests name. Raises httpx.HTTPError or ValueError if the server tells none."""
        if self._model is None:
            response = await self._http.get("/v1/models")
            response.raise_for_status()
            models = response.json().get("data") or []
            if not models:
                raise ValueError("the server lists no model")
            self._model = str(models[0]["id"])
        return self._model

    async def send(self, request: Request, *, planned_s: float | None = None) -> RequestRecord:
        """Send, read to the end, measure. Asks for the model first if none is known, and raises as `model`
        does.

        planned_s: when this was due, by the same clock, to report lateness.
        """
        body = request.body(await self.model())
        started_s = self._clock()
        measurement = StreamMeasurement(started_s)
        record = await self._measured(request.path, body, measurement)
        return record if planned_s is None else replace(record, late_s=max(0.0, started_s - planned_s))

    async def _measured(
        self, path: str, body: Mapping[str, object], measurement: StreamMeasurement
    ) -> RequestRecord:
        try:
            async with self._http.stream("POST", path, json=body) as response:
                measurement.headers(response.headers.multi_items())
                if response.status_code != httpx.codes.OK:
                    text = (await response.aread()).decode(errors="replace")
                    return measurement.fail(f"status_{response.status_code}", text[:500], self._clock())
                async for data in response.aiter_bytes():
                    measurement.feed(data, self._clock())
        except httpx.TimeoutException as exc:
            return measurement.fail("timeout", type(exc).__name__, self._clock())
        except httpx.ConnectError as exc:
            return measurement.fail("connect", str(exc), self._clock())
        except httpx.RemoteProtocolError as exc:
            return measurement.fail("cut_stream", str(exc), self._clock())
        except httpx.HTTPError as exc:
            return measurement.fail("connection", f"{type(exc).__name__}: {exc}", self._clock())
        return measurement.end(self._clock())

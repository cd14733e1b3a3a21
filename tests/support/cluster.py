"""A whole handoff on one process's sockets: real apps, real uvicorn, one thread each, a tiny model.

Workers are real engines over real models; nothing is replaced. What needs real processes (signals, kill -9) uses
`handoff up` instead.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from router.app import create_app as create_router
from router.checkpoint import Checkpoint
from router.keys import load_keys
from router.settings import RouterSettings
from services.decode.app import create_app as create_decode
from services.decode.settings import DecodeSettings
from services.prefill.app import create_app as create_prefill
from services.prefill.settings import PrefillSettings
from shared.worker.assemble import Worker, assemble
from tests.support import http
from tests.support.servers import ServerThread

SECRET = "a-secret-for-the-tests"
AUTH = {"Authorization": f"Bearer {SECRET}"}


@dataclass
class RunningWorker:
    """One worker of the cluster and its server."""

    worker: Worker
    server: ServerThread

    @property
    def url(self) -> str:
        return self.server.url

    def metric(self, name: str, **labels: str) -> float:
        """The value of one metric at /metrics."""
        return metric(self.url, name, **labels)


@dataclass
class Cluster:
    """Router URL and the workers behind it."""

    router: ServerThread
    prefill: list[RunningWorker] = field(default_factory=list)
    decode: list[RunningWorker] = field(default_factory=list)

    @property
    def url(self) -> str:
        return self.router.url

    @property
    def workers(self) -> list[RunningWorker]:
        return [*self.prefill, *self.decode]

    def check_nothing_left(self) -> None:
        """Every request has ended, every block of every worker is free or cached, and the books agree.

        A client has its answer a moment before the workers have put away what it took.
        """
        wait_until(lambda: all(running.worker.engine.num_groups == 0 for running in self.workers))
        for running in self.workers:
            counts = running.worker.pool.counts()
            assert (counts.live, counts.promised, counts.leaked) == (0, 0, 0), running.url
            running.worker.pool.check_integrity()


@contextmanager
def run_worker(role: str, model: Path, **settings: Any) -> Iterator[RunningWorker]:
    """One prefill or decode worker with a loaded model."""
    values: dict[str, Any] = {
        "model": str(model),
        "secret": SECRET,
        "kv_pool_bytes": 8 << 20,
        "num_threads": 1,
    } | settings
    if role == "prefill":
        prefill = PrefillSettings(**values)
        worker = assemble(prefill, "prefill", model.parent, _quiet)
        app = create_prefill(worker, prefill, SECRET)
    else:
        decode = DecodeSettings(**values)
        worker = assemble(decode, "decode", model.parent, _quiet)
        app = create_decode(worker, decode, SECRET)
    with ServerThread(app) as server:
        yield RunningWorker(worker, server)


@contextmanager
def run_cluster(
    model: Path,
    *,
    num_prefill: int = 1,
    num_decode: int = 1,
    prefill: dict[str, Any] | None = None,
    decode: dict[str, Any] | None = None,
    router: dict[str, Any] | None = None,
) -> Iterator[Cluster]:
    """A ready cluster. num_prefill 0 is unified mode. The dicts are settings of each kind."""
    with ExitStack() as stack:
        prefills = [
            stack.enter_context(run_worker("prefill", model, name=f"p{i}", **(prefill or {})))
            for i in range(num_prefill)
        ]
        decodes = [
            stack.enter_context(run_worker("decode", model, name=f"d{i}", **(decode or {})))
            for i in range(num_decode)
        ]
        values: dict[str, Any] = {
            "model": str(model),
            "secret": SECRET,
            "prefill_urls": tuple(w.url for w in prefills),
            "decode_urls": tuple(w.url for w in decodes),
            # All loops share two cores with whatever else runs: a look that is late is no lost worker.
            "health_timeout_s": 20.0,
            "connect_timeout_s": 20.0,
        }
        checkpoint = Checkpoint.load(model, "tiny")
        settings = RouterSettings(**(values | (router or {})))
        app = create_router(settings, checkpoint, SECRET, keys=load_keys(settings))
        server = stack.enter_context(ServerThread(app))
        cluster = Cluster(server, prefills, decodes)
        wait_until(lambda: http.get(f"{server.url}/ready").status_code == 200)
        yield cluster


def wait_until(condition: Callable[[], bool], timeout_s: float = 20.0) -> None:
    """Poll from outside what no event tells a test: the state of another server."""
    import time

    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, "the condition did not come true in time"
        time.sleep(0.01)


def metric(url: str, name: str, **labels: str) -> float:
    """The sum of a metric's samples with these labels."""
    text = http.get(f"{url}/metrics").text
    total = 0.0
    for family in text_string_to_metric_families(text):
        for sample in family.samples:
            if sample.name == name and labels.items() <= sample.labels.items():
                total += sample.value
    return total


def _quiet(_: str) -> None:
    return None

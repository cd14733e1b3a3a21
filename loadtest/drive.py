"""Sends a workload with a LoadClient and gathers the records.

Closed loop: a fixed number of users, each sending its next request when its last one ended; it measures
what a server can do. Open loop: requests go out when they are due, however slow the answers; it measures
what users would see. Cancelling a drive cancels its requests.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Iterator

from loadtest.client import LoadClient, Request
from loadtest.metrics import RequestRecord
from loadtest.workload import Timed


async def closed_loop(
    client: LoadClient, requests: Iterable[Request], *, concurrency: int
) -> list[RequestRecord]:
    """Send all requests, `concurrency` at a time. Records in order of their ends."""
    if concurrency < 1:
        raise ValueError("concurrency is at least 1")
    todo = iter(requests)
    records: list[RequestRecord] = []
    await client.model()
    async with asyncio.TaskGroup() as users:
        for _ in range(concurrency):
            users.create_task(_user(client, todo, records))
    return records


async def _user(client: LoadClient, todo: Iterator[Request], records: list[RequestRecord]) -> None:
    for request in todo:
        record = await client.send(request)
        records.append(record)


async def open_loop(client: LoadClient, timed: Iterable[Timed]) -> list[RequestRecord]:
    """Send each request when it is due. Records in order of sending; `late_s` tells how late it was."""
    await client.model()
    start_s = client.now_s()
    tasks: list[asyncio.Task[RequestRecord]] = []
    async with asyncio.TaskGroup() as group:
        for item in timed:
            planned_s = start_s + item.due_s
            await asyncio.sleep(max(0.0, planned_s - client.now_s()))
            tasks.append(group.create_task(client.send(item.request, planned_s=planned_s)))
    return [task.result() for task in tasks]

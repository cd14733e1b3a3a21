"""Both kinds of event loop: the router runs on uvloop, whose transports differ in kind."""

from __future__ import annotations

import asyncio
from collections.abc import Callable

import uvloop


def pytest_asyncio_loop_factories() -> dict[str, Callable[[], asyncio.AbstractEventLoop]]:
    """Every asynchronous test of this folder, on each."""
    return {"asyncio": asyncio.new_event_loop, "uvloop": uvloop.new_event_loop}

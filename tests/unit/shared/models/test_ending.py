"""A signal while the hub's client downloads, with threads that know nothing of it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time

import pytest

_DOWNLOAD = """
import sys, time
from concurrent.futures import ThreadPoolExecutor
import shared.models.hub as hub
from shared.server import exit_on_sigterm

def snapshot_download(*_, **__):
    with ThreadPoolExecutor() as pool:
        print("downloading", flush=True)
        list(pool.map(time.sleep, [600]))

hub.hub_answers = lambda _: True
hub.snapshot_download = snapshot_download
hub.ends_after_signal.__wrapped__.__defaults__ = (0.3,)
exit_on_sigterm()
hub.fetch_repository("owner/name", weights=True, report=lambda _: None)
"""


@pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGTERM])
def test_the_process_ends_soon(how: signal.Signals) -> None:
    """`handoff model pull` and workers waited for minutes; that of `handoff up` has its own end."""
    environ = {name: value for name, value in os.environ.items() if name != "HF_HUB_OFFLINE"}
    with subprocess.Popen(
        [sys.executable, "-c", _DOWNLOAD], env=environ, stdout=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout is not None
        assert any("downloading" in line for line in process.stdout)
        time.sleep(0.2)  # into the wait for its thread; earlier it ends sooner, by the signal itself
        process.send_signal(how)
        assert process.wait(60) in (128 + how, -how)

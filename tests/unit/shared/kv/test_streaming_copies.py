"""The tunable of the C library that makes large copies go past the caches."""

from __future__ import annotations

import os
import platform
import re
import subprocess
from pathlib import Path

import pytest

from shared.kv.streaming_copies import FROM_BYTES, NAME, TUNABLE, streaming_copies


def test_what_others_have_set_stays() -> None:
    """Other tunables are kept, and a threshold that the user chose is not touched."""
    assert {NAME: f"{TUNABLE}={FROM_BYTES}"} == streaming_copies({})
    assert {NAME: f"glibc.malloc.check=3:{TUNABLE}={FROM_BYTES}"} == streaming_copies(
        {NAME: "glibc.malloc.check=3"}
    )
    assert {} == streaming_copies({NAME: f"glibc.malloc.check=3:{TUNABLE}=1000000"})


@pytest.mark.skipif(
    platform.libc_ver()[0] != "glibc"
    or tuple(map(int, platform.libc_ver()[1].split("."))) < (2, 33)
    or platform.machine() != "x86_64",
    reason="another library or processor, or a loader that does not tell",
)
def test_the_library_takes_it() -> None:
    """Its own loader tells with which tunables a process would run."""
    loader = re.search(r"/\S*/ld-linux\S*", Path("/proc/self/maps").read_text())
    assert loader is not None
    told = subprocess.run(
        [loader[0], "--list-tunables"],
        env=dict(os.environ) | streaming_copies({}),
        capture_output=True,
        text=True,
        check=True,
    )
    assert f"{TUNABLE}: {FROM_BYTES:#x} " in told.stdout

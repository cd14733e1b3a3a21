"""Settings that both workers share: bounds, and core lists."""

from __future__ import annotations

import pytest

from shared.settings import BadSettings, load
from shared.worker.settings import WorkerSettings, parse_cpus


@pytest.mark.parametrize(
    ("text", "cores"),
    [("0", {0}), ("0-3", {0, 1, 2, 3}), ("0-1,8", {0, 1, 8}), ("5,5,4-5", {4, 5}), ("7-7", {7})],
)
def test_core_lists_name_cores_and_ranges(text: str, cores: set[int]) -> None:
    """Ranges include both ends, and repetition does not matter."""
    assert cores == parse_cpus(text) == parse_cpus(str(load(WorkerSettings, {"HANDOFF_CPUS": text}).cpus))


@pytest.mark.parametrize("text", [" ", "a", "1-", "-1", "1,", "1,,2", "0-1-2", "3-0", "0-99999999999", " 1"])
def test_core_lists_that_say_nothing_stop_the_start(text: str) -> None:
    """A malformed, backward or absurd range is one clear line that names the setting."""
    with pytest.raises(BadSettings, match="HANDOFF_CPUS"):
        load(WorkerSettings, {"HANDOFF_CPUS": text})


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("BLOCK_SIZE", ["1", "16", "1024"], ["0", "1025", "1.5"]),
        ("CHUNK_SIZE", ["0", "256"], ["-1"]),
        ("MAX_NUM_SEQS", ["1"], ["0"]),
        ("MAX_QUEUED", ["1"], ["0"]),
        ("MAX_MODEL_LEN", ["2"], ["1"]),
        ("KV_POOL_BYTES", ["65536"], ["65535"]),
        ("QUEUE_TIMEOUT_S", ["0.5"], ["0", "inf", "nan"]),
        ("STEP_LIMIT_S", ["0.5", "3600"], ["0", "3601", "nan"]),
        ("NUM_THREADS", ["1"], ["0"]),
        ("DTYPE", ["auto", "bfloat16"], ["int8"]),
        ("DEVICE", ["auto", "cpu", "cuda", "cuda:7"], ["cuda:", "gpu", "cuda:x"]),
        ("NAME", ["decode-1.a_B", ""], [" ", "a b", "x" * 65, "é"]),
    ],
)
def test_every_setting_has_bounds(name: str, good: list[str], bad: list[str]) -> None:
    """Values at the edge are read; past it the start stops with the setting's name."""
    for value in good:
        load(WorkerSettings, {f"HANDOFF_{name}": value})
    for value in bad:
        with pytest.raises(BadSettings, match=f"HANDOFF_{name}"):
            load(WorkerSettings, {f"HANDOFF_{name}": value})


def test_defaults_need_no_environment() -> None:
    """An empty environment is a complete configuration."""
    settings = load(WorkerSettings, {})
    assert (16, 256, "auto") == (settings.block_size, settings.chunk_size, settings.device)

"""From settings to a loaded worker, with the tiny model."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch

from shared.settings import BadSettings, load
from shared.worker.assemble import Worker, assemble
from shared.worker.settings import WorkerSettings
from shared.worker.warm_up import warm_up
from tests.support.tiny_model import build_tiny_model
from tests.unit.shared.engine.helpers import assert_empty

TINY_POSITION_BYTES = 2 * 3 * 2 * 16 * 4
"""K and V, layers, KV heads, head dim, float32."""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint that is served in place."""
    return build_tiny_model(tmp_path_factory.mktemp("model"))


def _assemble(folder: Path, tmp_path: Path, **environ: str) -> Worker:
    names = {"MODEL": str(folder), "DEVICE": "cpu", "NUM_THREADS": "1", "KV_POOL_BYTES": "1000000", **environ}
    settings = load(WorkerSettings, {f"HANDOFF_{name}": value for name, value in names.items()})
    return assemble(settings, "decode", tmp_path, lambda _: None)


def test_a_worker_is_what_checkpoint_and_settings_say(folder: Path, tmp_path: Path) -> None:
    """The pool takes whole blocks of the bytes it is given, and the context is bounded by both."""
    worker = _assemble(folder, tmp_path)
    num_blocks = 1_000_000 // (16 * TINY_POSITION_BYTES)
    assert num_blocks == worker.pool.num_blocks == worker.engine.pool_counts.num_blocks
    assert num_blocks * 16 == worker.limits.max_model_len
    assert ("decode", f"decode-{os.getpid()}") == (worker.role, worker.name)
    assert (3, 2, 16) == (worker.facts.num_layers, worker.facts.num_kv_heads, worker.facts.head_dim)
    assert worker.limits.vocab_size == worker.facts.vocab_size
    assert worker.boot != _assemble(folder, tmp_path).boot


@pytest.mark.parametrize(
    ("name", "values"),
    [
        ("KV_POOL_BYTES", {"KV_POOL_BYTES": "65536", "BLOCK_SIZE": "1024"}),
        ("KV_POOL_BYTES", {"KV_POOL_BYTES": str(1 << 50)}),
        ("KV_POOL_BYTES", {"KV_POOL_BYTES": str(1 << 70)}),
        ("MAX_MODEL_LEN", {"MAX_MODEL_LEN": "4097"}),
        ("CPUS", {"CPUS": "0-99998"}),
        ("DEVICE", {"DEVICE": "cuda:63"}),
    ],
)
def test_settings_that_this_host_or_model_cannot_meet_stop_the_start(
    folder: Path, tmp_path: Path, name: str, values: dict[str, str]
) -> None:
    """One clear line names the setting; nothing is left as a traceback."""
    with pytest.raises(BadSettings, match=f"HANDOFF_{name}"):
        _assemble(folder, tmp_path, **values)


def test_without_a_core_list_the_process_keeps_its_cores(folder: Path, tmp_path: Path) -> None:
    """Affinity stays, and the thread count is what was set."""
    before = os.sched_getaffinity(0)
    _assemble(folder, tmp_path)
    assert before == os.sched_getaffinity(0)
    assert 1 == torch.get_num_threads()


@pytest.mark.parametrize(
    "environ",
    [{}, {"MAX_MODEL_LEN": "2"}, {"MAX_MODEL_LEN": "3"}, {"CHUNK_SIZE": "5"}, {"CHUNK_SIZE": "0"}],
    ids=str,
)
async def test_the_warm_up_passes_with_every_allowed_limit(
    folder: Path, tmp_path: Path, environ: dict[str, str]
) -> None:
    """The shortest context that the settings allow can be started, and the warm-up leaves nothing owned."""
    worker = _assemble(folder, tmp_path, **environ)
    worker.engine.start()
    await warm_up(worker)
    worker.engine.close()
    assert_empty(worker.pool)

"""What `handoff up` would start on hosts of any size."""

from __future__ import annotations

from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from services.cli.plan import (
    ChildSpec,
    Host,
    Options,
    base_url,
    format_cores,
    plan,
    split_cores,
    with_checkpoint,
)
from services.cli.run import known_names, settings_classes
from shared.settings import load
from shared.worker.settings import parse_cpus

TWO_CORES = Host(cores=(0, 1), ports=(9001, 9002))
GIB = 1 << 30


def _plan(options: Options, host: Host, environ: dict[str, str] | None = None) -> dict[str, ChildSpec]:
    return {spec.name: spec for spec in plan(options, host, environ or {}, secret="s" * 32)}


def test_a_pair_on_two_cores_gets_one_core_each() -> None:
    """Prefill and decode never share a core if there are two; the router knows both and comes last."""
    children = _plan(Options(), TWO_CORES)
    assert ["prefill-0", "decode-0", "router"] == list(children)
    assert ["0", "1"] == [children[name].environ["HANDOFF_CPUS"] for name in ("prefill-0", "decode-0")]
    assert ["1", "1"] == [children[name].environ["HANDOFF_NUM_THREADS"] for name in ("prefill-0", "decode-0")]
    router = children["router"].environ
    assert "http://127.0.0.1:9001" == router["HANDOFF_PREFILL_URLS"]
    assert "http://127.0.0.1:9002" == router["HANDOFF_DECODE_URLS"]
    assert "http://127.0.0.1:8000/ready" == children["router"].ready_url


def test_unified_gives_all_cores_to_decode() -> None:
    """Without a prefill worker the decode worker has the machine, and as many threads as it is told."""
    children = _plan(Options(num_prefill=0), TWO_CORES)
    assert ["decode-0", "router"] == list(children)
    assert ("0-1", "2") == tuple(
        children["decode-0"].environ[f"HANDOFF_{n}"] for n in ("CPUS", "NUM_THREADS")
    )
    assert "" == children["router"].environ["HANDOFF_PREFILL_URLS"]

    equal = _plan(Options(num_prefill=0, threads_per_worker=1), TWO_CORES)
    assert "1" == equal["decode-0"].environ["HANDOFF_NUM_THREADS"]


@pytest.mark.parametrize("options", [Options(), Options(num_prefill=0), Options(num_prefill=2, num_decode=3)])
@pytest.mark.parametrize("gpus", [(), (80 * GIB,), (80 * GIB, 80 * GIB)])
def test_every_child_accepts_its_settings(options: Options, gpus: tuple[int, ...], tmp_path: Path) -> None:
    """Whatever is planned, each process can read its own environment."""
    host = Host(cores=tuple(range(8)), ports=tuple(range(9000, 9005)), gpus=gpus)
    specs = plan(options, host, {"HANDOFF_MAX_QUEUED": "7"}, secret="s" * 32)
    for spec in with_checkpoint(specs, tmp_path, GIB, host):
        settings = load(settings_classes()[spec.role], spec.environ, known_names())
        assert str(tmp_path) == settings.model_dump()["model"]


def test_the_users_own_settings_reach_the_workers() -> None:
    """What is set outside is passed on, except what only the plan can know."""
    environ = {"HANDOFF_CHUNK_SIZE": "64", "HANDOFF_CPUS": "1", "HANDOFF_PORT": "1234", "HF_HOME": "/models"}
    decode = _plan(Options(port=1234), TWO_CORES, environ)["decode-0"].environ
    assert ("64", "1", "9002", "/models") == tuple(
        decode[name] for name in ("HANDOFF_CHUNK_SIZE", "HANDOFF_CPUS", "HANDOFF_PORT", "HF_HOME")
    )


def test_workers_take_turns_on_the_gpus() -> None:
    """Each worker has a card of its own where there are enough."""
    host = Host(cores=(0, 1, 2, 3), ports=(1, 2, 3), gpus=(80 * GIB, 80 * GIB))
    children = _plan(Options(num_decode=2), host)
    assert ["cuda:0", "cuda:1", "cuda:0"] == [
        children[name].environ["HANDOFF_DEVICE"] for name in ("prefill-0", "decode-0", "decode-1")
    ]


@pytest.mark.parametrize("device", ["auto", "cuda"])
@pytest.mark.parametrize("num_gpus", [0, 1, 2])
def test_a_device_that_names_no_card_leaves_the_choice_to_the_plan(
    device: str, num_gpus: int, tmp_path: Path
) -> None:
    """Both workers once went to the first of two cards, and on a single one its memory was not shared out."""
    host = Host(cores=(0, 1), ports=(1, 2), gpus=(102 * GIB,) * num_gpus)

    def placed(environ: dict[str, str]) -> list[tuple[str | None, str | None]]:
        specs = with_checkpoint(plan(Options(), host, environ, secret="s" * 32), tmp_path, GIB, host)
        return [
            (spec.environ.get("HANDOFF_DEVICE"), spec.environ.get("HANDOFF_KV_POOL_BYTES"))
            for spec in specs[:2]
        ]

    expected = placed({}) if num_gpus else [(device, None), (device, None)]
    assert expected == placed({"HANDOFF_DEVICE": device})


def test_a_card_that_is_named_is_used() -> None:
    """By all workers, as the user said."""
    host = Host(cores=(0, 1), ports=(1, 2), gpus=(80 * GIB, 80 * GIB))
    children = _plan(Options(), host, {"HANDOFF_DEVICE": "cuda:1"})
    assert ["cuda:1", "cuda:1"] == [
        children[name].environ["HANDOFF_DEVICE"] for name in ("prefill-0", "decode-0")
    ]


def test_workers_on_one_gpu_share_its_memory(tmp_path: Path) -> None:
    """Four fifths of what is left of each one's half after the weights; on a card of its own a worker decides."""
    one = Host(cores=(0, 1), ports=(1, 2), gpus=(102 * GIB,))
    specs = with_checkpoint(plan(Options(), one, {}, secret="s" * 32), tmp_path, GIB, one)
    assert [str(40 * GIB), str(40 * GIB), None] == [s.environ.get("HANDOFF_KV_POOL_BYTES") for s in specs]

    two = Host(cores=(0, 1), ports=(1, 2), gpus=(102 * GIB, 102 * GIB))
    specs = with_checkpoint(plan(Options(), two, {}, secret="s" * 32), tmp_path, GIB, two)
    assert [None, None, None] == [s.environ.get("HANDOFF_KV_POOL_BYTES") for s in specs]


@given(st.sets(st.integers(0, 255), min_size=1), st.integers(1, 64))
def test_cores_are_split_fairly(cores: set[int], num_workers: int) -> None:
    """Every core is used once and shares differ by at most one; with too few cores each worker has one."""
    shares = split_cores(sorted(cores), num_workers)
    assert num_workers == len(shares)
    if len(cores) >= num_workers:
        assert sorted(cores) == sorted(core for share in shares for core in share)
        assert max(map(len, shares)) - min(map(len, shares)) <= 1
    else:
        assert {1} == {len(share) for share in shares}


@given(st.sets(st.integers(0, 300), min_size=1))
def test_core_lists_are_read_as_they_were_written(cores: set[int]) -> None:
    """Workers parse HANDOFF_CPUS to the cores that were meant."""
    assert cores == parse_cpus(format_cores(sorted(cores)))


@pytest.mark.parametrize(
    ("host", "expected"),
    [
        ("127.0.0.1", "http://127.0.0.1:8000"),
        ("0.0.0.0", "http://127.0.0.1:8000"),
        ("::", "http://[::1]:8000"),
        ("fd00::1", "http://[fd00::1]:8000"),
        ("example.test", "http://example.test:8000"),
    ],
)
def test_the_url_is_one_that_a_client_here_can_use(host: str, expected: str) -> None:
    """Addresses that mean all interfaces are no addresses to connect to."""
    assert expected == base_url(host, 8000)

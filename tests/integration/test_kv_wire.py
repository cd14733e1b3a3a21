"""Quantised KV between real workers: opted into on both sides, told of everywhere, measured before it may be."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
from pydantic import SecretStr
from typer.testing import CliRunner

from services.cli.main import app
from services.prefill.settings import PrefillSettings
from shared.settings import BadSettings
from shared.worker.assemble import assemble
from tests.support.cluster import SECRET, Cluster, run_cluster, wait_until
from tests.support.completions import GREEDY, complete, random_prompt, token_ids
from tests.support.oracle import Oracle

INT8 = {"kv_wire": "int8", "kv_transports": "tcp", "kv_wire_max_error": 0.5}


@pytest.fixture(scope="module")
def quantised(tiny_model: Path) -> Iterator[Cluster]:
    """Both sides quantise; blocks and chunks differ, and chunks are longer than groups of tokens."""
    prefill, decode = INT8 | {"block_size": 8, "chunk_size": 48}, INT8 | {"block_size": 16}
    with run_cluster(tiny_model, prefill=prefill, decode=decode) as cluster:
        yield cluster


def counted(cluster: Cluster) -> list[float]:
    """Bytes of quantised blobs so far, by prefill's count and by decode's."""
    labels = {"transport": "tcp", "kv_wire": "int8"}
    return [
        cluster.prefill[0].metric("handoff_kv_sent_wire_bytes_total", **labels),
        cluster.decode[0].metric("handoff_kv_received_wire_bytes_total", **labels),
    ]


def test_answers_are_as_ever_and_fewer_bytes_travel(quantised: Cluster, oracle: Oracle) -> None:
    """Headers, the last event's report and the metrics of both workers say how KV came and what that saved."""
    prompt = random_prompt(200, seed=1)
    per_token = quantised.decode[0].worker.kv_shape.bytes_per_token
    before = counted(quantised)

    response = complete(quantised, prompt, max_tokens=12, **GREEDY)

    assert oracle(prompt, 12) == token_ids(response)[0]
    wire_bytes = int(response.headers["x-handoff-wire-bytes"])
    assert ("int8", str(200 * per_token)) == (
        response.headers["x-handoff-kv-wire"],
        response.headers["x-handoff-kv-bytes"],
    )
    assert 200 * per_token / 4 < wire_bytes < 200 * per_token / 2
    wait_until(lambda: all(now > then for now, then in zip(counted(quantised), before, strict=True)))
    assert [wire_bytes, wire_bytes] == [
        now - then for now, then in zip(counted(quantised), before, strict=True)
    ]


def test_the_second_turn_sends_all_of_it_again(quantised: Cluster) -> None:
    """Decode's prefix cache holds exact KV alone: tokens never depend on how an earlier request's KV came.

    What decode computed over quantised KV is not exact either.
    """
    prompt = random_prompt(64, seed=77)
    first = complete(quantised, prompt, max_tokens=33, **GREEDY)
    second_prompt = prompt + token_ids(first)[0] + random_prompt(16, seed=78)

    second = complete(quantised, second_prompt, max_tokens=4, **GREEDY)

    per_token = quantised.decode[0].worker.kv_shape.bytes_per_token
    assert ("int8", len(second_prompt) * per_token) == (
        second.headers["x-handoff-kv-wire"],
        int(second.headers["x-handoff-kv-bytes"]),
    )
    quantised.check_nothing_left()


def test_a_replay_says_that_kv_had_travelled_quantised(
    tiny_model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file holds exact KV whatever travelled; it used to say nothing of that."""
    monkeypatch.setenv("HANDOFF_SECRET", SECRET)
    path = tmp_path / "case.safetensors"
    kept = INT8 | {"kv_save_dir": tmp_path / "kept"}
    with run_cluster(tiny_model, prefill=kept, decode=INT8) as cluster:
        request_id = complete(cluster, random_prompt(70, seed=3), max_tokens=3, **GREEDY).headers[
            "x-request-id"
        ]
        cluster.check_nothing_left()
        saved, replayed = (
            CliRunner().invoke(app, ["kv", *arguments])
            for arguments in (
                ["save", request_id, "--url", cluster.prefill[0].url, "-o", str(path)],
                ["replay", str(path), "--url", cluster.decode[0].url, "--json"],
            )
        )

    assert (0, 0) == (saved.exit_code, replayed.exit_code)
    assert "travelled as int8; the replay sends it exact" in replayed.stderr


def test_one_side_alone_changes_nothing(tiny_model: Path) -> None:
    """A decode worker that was not told to take quantised KV gets exact KV."""
    with run_cluster(tiny_model, prefill=INT8, decode={"kv_transports": "tcp"}) as cluster:
        response = complete(cluster, random_prompt(70, seed=2), max_tokens=3, **GREEDY)
    assert "none" == response.headers["x-handoff-kv-wire"]
    assert int(response.headers["x-handoff-wire-bytes"]) > int(response.headers["x-handoff-kv-bytes"])


def test_too_large_an_error_is_no_start(tiny_model: Path) -> None:
    """The error is measured on the worker's own model; the message says it, and what is allowed."""
    settings = PrefillSettings(
        model=str(tiny_model),
        secret=SecretStr(SECRET),
        kv_pool_bytes=8 << 20,
        kv_wire="fp8",
        kv_wire_max_error=1e-6,
    )
    with pytest.raises(
        BadSettings, match=r"HANDOFF_KV_WIRE: fp8 changes a logit .* by \d.*MAX_ERROR allows 1e-06"
    ):
        assemble(settings, "prefill", tiny_model.parent, lambda _: None)


def test_a_pool_too_small_to_measure_is_no_start(tiny_model: Path) -> None:
    """What cannot be measured cannot be allowed."""
    settings = PrefillSettings(
        model=str(tiny_model),
        secret=SecretStr(SECRET),
        kv_pool_bytes=8 << 20,
        kv_wire="int8",
        max_model_len=4,
    )
    with pytest.raises(BadSettings, match="cannot be measured"):
        assemble(settings, "prefill", tiny_model.parent, lambda _: None)

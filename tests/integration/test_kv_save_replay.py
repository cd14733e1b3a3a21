"""`handoff kv save` and `replay` against real workers: what a file says is what the request said."""

from __future__ import annotations

import json
import shutil
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from safetensors import safe_open
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route
from typer.testing import CliRunner

from services.cli.kv_blob import check_blob
from services.cli.main import app
from tests.support import http
from tests.support.cluster import AUTH, SECRET, Cluster, run_cluster, run_worker, wait_until
from tests.support.servers import ServerThread


@pytest.fixture(scope="module")
def keeping(tiny_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    """A cluster whose prefill worker keeps the newest two hand-offs."""
    folder = tmp_path_factory.mktemp("kept") / "kv"
    with run_cluster(tiny_model, prefill={"kv_save_dir": folder, "kv_save_files": 2}) as cluster:
        yield cluster


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user sets it."""
    monkeypatch.setenv("HANDOFF_SECRET", SECRET)


def run(*arguments: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of `handoff kv ...`."""
    result = CliRunner().invoke(app, ["kv", *map(str, arguments)], prog_name="handoff")
    return result.exit_code, result.stdout, result.stderr


def ask(cluster: Cluster, prompt: list[int], **fields: Any) -> tuple[str, list[dict[str, Any]]]:
    """Request id and choices of one completion, token ids included; its workers have put everything away."""
    answer = http.post(
        f"{cluster.url}/v1/completions",
        json={"model": "tiny", "prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True}
        | {"return_token_ids": True}
        | fields,
    )
    assert answer.status_code == 200, answer.text
    cluster.check_nothing_left()
    return answer.headers["x-request-id"], answer.json()["choices"]


def saved(cluster: Cluster, request_id: str, folder: Path) -> Path:
    """The file that `handoff kv save` wrote."""
    path = folder / f"{request_id}.safetensors"
    status, output, errors = run("save", request_id, "--url", cluster.prefill[0].url, "-o", path)
    assert (0, "") == (status, errors)
    assert output.startswith(f"{path}: OK (kv-")
    return path


def replayed(path: Path, url: str, *options: object) -> list[dict[str, Any]]:
    """The lines of `handoff kv replay --json`."""
    status, output, errors = run("replay", path, "--url", url, "--json", *options)
    assert (0, "") == (status, errors)
    return [json.loads(line) for line in output.splitlines()]


def test_a_saved_hand_off_says_the_same_again(keeping: Cluster, tiny_model: Path, tmp_path: Path) -> None:
    """On another decode worker, which holds nothing yet: the same ids, all KV sent, every block free after."""
    request_id, [choice] = ask(keeping, list(range(5, 42)))
    path = saved(keeping, request_id, tmp_path)

    with run_worker("decode", tiny_model) as other:
        *_, end = replayed(path, other.url, "--model", tiny_model)
        sent = replayed(path, other.url)[1]["sent"]
        wait_until(lambda: other.worker.engine.num_groups == 0)
        counts = other.worker.pool.counts()

    check = check_blob(path)
    assert choice["token_ids"] == end["choices"][0]["token_ids"]
    assert (choice["text"], "length") == (end["choices"][0]["text"], end["choices"][0]["finish_reason"])
    assert check.layout.kv_bytes == end["finish"]["kv_bytes_received"]
    assert ("tcp", 5 * check.layout.kv_bytes // 37) == (
        sent["transport"],
        sent["kv_bytes"],
    )  # two blocks are held
    assert (0, 0, 0) == (counts.live, counts.promised, counts.leaked)


def test_the_file_is_whole_when_only_a_suffix_travelled(keeping: Cluster, tmp_path: Path) -> None:
    """One valid safetensors file from token 0, for its owner only, which says where the travelling began."""
    prompt = [7] * 20 + [8] * 20
    ask(keeping, prompt)
    request_id, _ = ask(keeping, [*prompt, 9, 10, 11])
    path = saved(keeping, request_id, tmp_path)

    check = check_blob(path)
    assert check.saved is not None
    assert (0, 43, 32) == (
        check.layout.manifest.from_token,
        check.layout.manifest.num_tokens,
        check.saved.sent_from,
    )
    assert [*prompt, 9, 10, 11] == check.saved.work.token_ids
    assert 0o600 == stat.S_IMODE(path.stat().st_mode)
    with safe_open(path, "numpy") as file:
        assert set(file.keys()) == {span.name for span in check.layout.spans()}
    assert "[32, 43); decode held what comes before" in run("inspect", path)[1]


def test_sampled_choices_are_replayed_with_their_seed(keeping: Cluster, tmp_path: Path) -> None:
    """n = 2 at temperature 1: the same draws, and text for people."""
    request_id, choices = ask(keeping, list(range(60, 80)), n=2, temperature=1, seed=3)
    path = saved(keeping, request_id, tmp_path)

    status, output, errors = run("replay", path, "--url", keeping.decode[0].url)

    assert (0, "") == (status, errors)
    for choice in choices:
        ids = " ".join(map(str, choice["token_ids"]))
        assert f"choice {choice['index']} (length): {ids}" in output


def test_only_the_newest_are_kept(keeping: Cluster, tmp_path: Path) -> None:
    """Bounded in number; what has gone is told so, and nothing is written."""
    ids = [ask(keeping, [number] * 12)[0] for number in (30, 31, 32)]

    statuses = [run("save", i, "--url", keeping.prefill[0].url, "-o", tmp_path / i)[0] for i in ids]

    assert [1, 0, 0] == statuses
    assert set(ids[1:]) == {path.name for path in tmp_path.iterdir()}


def test_without_the_switch_nothing_is_kept(pd: Cluster, tmp_path: Path) -> None:
    """The worker says which setting is missing."""
    request_id, _ = ask(pd, list(range(5, 42)))

    status, _, errors = run("save", request_id, "--url", pd.prefill[0].url, "-o", tmp_path / "blob")

    assert 1 == status
    assert "HANDOFF_KV_SAVE_DIR is not set" in errors
    assert [] == list(tmp_path.iterdir())


def test_a_hand_off_that_cannot_be_kept_leaves_nothing(tiny_model: Path, tmp_path: Path) -> None:
    """Whatever keeping it raises, the answer is whole, its blocks are freed, and the request is counted.

    They used to be held for ever after anything but an OSError; here no folder can have the name.
    """
    with run_cluster(tiny_model, prefill={"kv_save_dir": tmp_path / "no\0folder"}) as cluster:
        before = cluster.prefill[0].metric("handoff_prefill_requests_total", ending="ok")
        _, [choice] = ask(cluster, list(range(5, 42)))
        ended = cluster.prefill[0].metric("handoff_prefill_requests_total", ending="ok")

    assert 8 == len(choice["token_ids"])
    assert before + 1 == ended


def test_the_route_wants_the_secret(keeping: Cluster) -> None:
    """KV holds the prompt: no key, no file; a name that is no id is no path either."""
    request_id, _ = ask(keeping, [50] * 20)
    url = f"{keeping.prefill[0].url}/v1/kv/{request_id}"

    assert [401, 200, 404] == [
        http.get(url).status_code,
        http.get(url, headers=AUTH).status_code,
        http.get(f"{keeping.prefill[0].url}/v1/kv/..%2F..%2Fetc", headers=AUTH).status_code,
    ]


def test_a_foreign_model_is_refused(keeping: Cluster, tiny_model: Path, tmp_path: Path) -> None:
    """The differing parts are named before anything is sent, and the exit status is 1."""
    request_id, _ = ask(keeping, list(range(5, 42)))
    path = saved(keeping, request_id, tmp_path)
    other = shutil.copytree(tiny_model, tmp_path / "other")
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"rope_theta": 777.0, "rope_parameters": None}))

    with run_worker("decode", other) as worker:
        status, _, errors = run("replay", path, "--url", worker.url)
        puts = worker.metric("handoff_kv_puts_total")

    assert 1 == status
    assert "differ" in errors
    assert 0 == puts


def test_a_replay_may_take_longer_than_a_worker_may_be_silent(keeping: Cluster, tmp_path: Path) -> None:
    """--timeout bounds each silence alone: it used to be the whole request's deadline as well."""
    request_id, _ = ask(keeping, list(range(5, 42)))
    path = saved(keeping, request_id, tmp_path)
    info = http.get(f"{keeping.decode[0].url}/v1/info", headers=AUTH).content
    asked: list[dict[str, Any]] = []

    async def decode(request: Request) -> Response:
        asked.append(await request.json())
        return Response(b'{"code": "overloaded", "message": "no room"}', 429)

    async def tell(_: Request) -> Response:
        return Response(info)

    routes = [Route("/v1/info", tell), Route("/v1/decode", decode, methods=["POST"])]
    with ServerThread(Starlette(routes=routes)) as worker:
        status, _, _ = run("replay", path, "--url", worker.url, "--timeout", 20)

    assert 1 == status
    assert [86_400] == [work["timeout_s"] for work in asked]


def test_a_replay_needs_a_sound_whole_file_and_a_decode_worker(keeping: Cluster, tmp_path: Path) -> None:
    """Damage, a prefill worker, nobody at all: one clear line, exit status 1; a missing secret is a usage error."""
    request_id, _ = ask(keeping, list(range(5, 42)))
    path = saved(keeping, request_id, tmp_path)
    damaged = tmp_path / "damaged"
    content = bytearray(path.read_bytes())
    content[-1000] ^= 1
    damaged.write_bytes(content)

    outcomes = [
        run("replay", damaged, "--url", keeping.decode[0].url),
        run("replay", path, "--url", keeping.prefill[0].url),
        run("replay", path, "--url", "http://127.0.0.1:1"),
    ]

    assert [1, 1, 1] == [status for status, _, _ in outcomes]
    for (_, _, errors), word in zip(
        outcomes, ("damaged", "is a prefill worker", "http://127.0.0.1:1"), strict=True
    ):
        assert word in errors
        assert 1 == len(errors.splitlines())

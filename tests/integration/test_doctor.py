"""`handoff doctor` against real workers: it measures by their real routes, and leaves nothing behind."""

from __future__ import annotations

import importlib.util
import json
import threading
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from services.cli.main import app
from shared.wire import Sampling
from tests.support import http
from tests.support.cluster import AUTH, SECRET, Cluster, run_cluster, run_worker, wait_until
from tests.support.completions import GREEDY, complete, random_prompt, token_ids
from tests.support.oracle import Oracle


@pytest.fixture(autouse=True)
def _secret(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a user sets it."""
    monkeypatch.setenv("HANDOFF_SECRET", SECRET)


@pytest.fixture(scope="module")
def chunked(tiny_model: Path) -> Iterator[Cluster]:
    """Workers that compute prompts in chunks of 16."""
    with run_cluster(tiny_model, prefill={"chunk_size": 16}, decode={"chunk_size": 16}) as cluster:
        yield cluster


def run(prefill: str, decode: str, *options: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of `handoff doctor`."""
    arguments = ["--prefill", prefill, "--decode", decode, *map(str, options)]
    result = CliRunner().invoke(app, ["doctor", *arguments], prog_name="handoff")
    return result.exit_code, result.stdout, result.stderr


def examined(cluster: Cluster, *options: object) -> dict[str, Any]:
    """The JSON line about a cluster's pair, which is healthy."""
    quick = ("--prompt", 16, "--prompt", 64, "--output", 8, "--running", 2, "--runs", 3, "--json")
    status, output, errors = run(cluster.prefill[0].url, cluster.decode[0].url, *quick, *options)
    assert (0, "") == (status, errors), output
    found: dict[str, Any] = json.loads(output)
    return found


def test_a_healthy_pair_is_measured_and_nothing_is_left(chunked: Cluster) -> None:
    """Every transport, prompts at both workers, steps, a stall and a verdict; blocks and reservations are back."""
    found = examined(chunked)

    assert found["healthy"]
    assert [("shm", None), ("unix", None), ("tcp", None)] == [
        (t["name"], t["problem"]) for t in found["transports"]
    ]
    for transport in found["transports"]:
        assert 3 == len(transport["median_s"])
        assert 0 < transport["bytes_per_s"]
    measured = found["measured"]
    assert [32, 64] == [tokens for tokens, _ in measured["local_s"]["points"]]
    assert [32, 64] == [tokens for tokens, _ in measured["remote_s"]["points"]]
    assert [1, 2] == [answers for answers, _ in measured["step_s"]["points"]]
    assert (16, [16, 64]) == (measured["chunk_size"], [cost["prompt_tokens"] for cost in found["mix"]])
    assert 64 == found["stall"]["prompt_tokens"]
    chunked.check_nothing_left()
    wait_until(lambda: chunked.decode[0].metric("handoff_reservations") == 0)


@pytest.mark.parametrize("num_choices", [1, 3])
def test_probes_teach_the_prefix_caches_nothing(chunked: Cluster, num_choices: int) -> None:
    """Made-up KV is never found: the same token ids are computed afresh, at either worker.

    Several choices used to be an internal error: the blob wants a first token for each.
    """
    work = {
        "request_id": "probe-1",
        "token_ids": [7 + num_choices] * 40,
        "num_prompt_tokens": 40,
        "num_choices": num_choices,
        "sampling": Sampling(max_tokens=1, temperature=0).model_dump(),
        "timeout_s": 20,
    }
    prefill, decode = chunked.prefill[0], chunked.decode[0]
    with http.stream("POST", f"{decode.url}/v1/decode/probe", json=work, headers=AUTH) as stream:
        lines = stream.iter_lines()  # kept: without it the connection closes
        handoff = json.loads(next(lines))["reserved"]
        sent = http.post(
            f"{prefill.url}/v1/prefill/probe", json=work | {"handoff": handoff, "runs": 3}, headers=AUTH
        )
        events = [json.loads(line) for line in sent.text.splitlines()]
    assert ["sent", "sent", "sent", "done"] == [next(iter(event)) for event in events]
    chunked.check_nothing_left()

    answer = http.post(f"{decode.url}/v1/decode", json=work | {"mode": "local"}, headers=AUTH)
    first = json.loads(answer.text.splitlines()[0])["first"]
    again = json.loads(http.post(f"{prefill.url}/v1/prefill", json=work, headers=AUTH).text.splitlines()[0])[
        "first"
    ]

    assert [(0, 40), (0, 40)] == [(one["cached_tokens"], one["computed_tokens"]) for one in (first, again)]


@pytest.mark.parametrize("leaves_first", ["prefill", "decode"])
def test_who_leaves_a_probe_in_the_middle_leaves_nothing(chunked: Cluster, leaves_first: str) -> None:
    """Either connection closed in mid-transfer: sending stops, and blocks and reservation are free."""
    work = {
        "request_id": f"probe-{leaves_first}",
        "token_ids": [11] * 4000,
        "num_prompt_tokens": 4000,
        "sampling": Sampling(max_tokens=1, temperature=0).model_dump(),
        "timeout_s": 60,
    }
    prefill, decode = chunked.prefill[0], chunked.decode[0]
    with ExitStack() as stack:
        streams = {}
        reserving = http.stream("POST", f"{decode.url}/v1/decode/probe", json=work, headers=AUTH)
        streams["decode"] = stack.enter_context(reserving)
        reserved = streams["decode"].iter_lines()
        body = work | {"handoff": json.loads(next(reserved))["reserved"], "runs": 64}
        sending = http.stream("POST", f"{prefill.url}/v1/prefill/probe", json=body, headers=AUTH)
        streams["prefill"] = stack.enter_context(sending)
        sent = streams["prefill"].iter_lines()
        next(sent)
        streams[leaves_first].close()
        if leaves_first == "decode":
            assert "reservation_gone" in list(sent)[-1]

    chunked.check_nothing_left()
    wait_until(lambda: decode.metric("handoff_reservations") == 0)


def test_requests_are_right_while_the_doctor_is_there(pd: Cluster, oracle: Oracle) -> None:
    """Greedy answers beside an examination equal those of plain transformers."""
    prompts = [random_prompt(20 + number, seed=number) for number in range(6)]
    answers: list[list[int]] = []

    def ask() -> None:
        for prompt in prompts:
            answers.extend(token_ids(complete(pd, prompt, max_tokens=8, **GREEDY)))

    asking = threading.Thread(target=ask)
    asking.start()
    found = examined(pd)
    asking.join()

    assert found["healthy"]
    assert [oracle(prompt, 8) for prompt in prompts] == answers
    pd.check_nothing_left()


def test_people_get_tables_and_plain_words(pd: Cluster) -> None:
    """The verdict last, then one JSON line."""
    status, output, errors = run(
        pd.prefill[0].url, pd.decode[0].url, "--prompt", 32, "--running", 2, "--runs", 2
    )

    assert (0, "") == (status, errors)
    *tables, last = output.splitlines()
    assert json.loads(last)["healthy"]
    for text in ("transport", "fingerprint", "decode step of 2", "Healthy: ", "Splitting ", "32 tokens: "):
        assert any(text in line for line in tables), text


def test_workers_of_two_models_are_a_problem(pd: Cluster, tiny_model: Path) -> None:
    """Named before anything is measured; exit status 1."""
    with run_worker("decode", tiny_model, dtype="bfloat16") as other:
        status, output, _ = run(pd.prefill[0].url, other.url, "--json")

    found = json.loads(output)
    assert (1, False, []) == (status, found["healthy"], found["transports"])
    assert any("differ in" in finding["text"] and "dtype" in finding["text"] for finding in found["findings"])


def test_a_transport_that_prefill_does_not_use_is_a_note(tiny_model: Path) -> None:
    """TCP alone: still healthy, and the others say why not."""
    with run_cluster(tiny_model, prefill={"kv_transports": "tcp"}) as cluster:
        found = examined(cluster)

    notes = [finding["text"] for finding in found["findings"] if finding["what"] == "transport"]
    assert [True, True, False] == ["is not used" in text for text in notes]


def hand_off(found: dict[str, Any]) -> tuple[str, Any, str]:
    """Name and entry of the transport that requests take, and the finding about it."""
    entries = {entry["name"]: entry for entry in found["transports"]}
    [text] = [finding["text"] for finding in found["findings"] if finding["what"] == "hand-off"]
    return found["transport"], entries[found["transport"]], text


NEEDS_NIXL = pytest.mark.skipif(
    importlib.util.find_spec("nixl_cu12") is None, reason="the extra handoff[nixl] is not installed"
)


@pytest.mark.parametrize(
    ("prefers", "taken"),
    [
        ("tcp,shm", "tcp"),
        ("unix,tcp,shm", "unix"),
        ("shm,unix,tcp", "shm"),
        pytest.param("nixl,tcp", "nixl", marks=NEEDS_NIXL),
    ],
)
def test_the_verdict_is_on_the_transport_that_a_request_takes(
    tiny_model: Path, prefers: str, taken: str
) -> None:
    """Prefill's order counts. The doctor used to judge by shm whenever that worked, whatever requests took."""
    decode = {"kv_transports": "nixl,tcp" if taken == "nixl" else "shm,unix,tcp"}
    with run_cluster(tiny_model, prefill={"kv_transports": prefers}, decode=decode) as cluster:
        found = examined(cluster)
        answer = complete(cluster, random_prompt(40, seed=5), max_tokens=2, **GREEDY)

    [link] = [
        {key: entry[key] for key in ("fixed_s", "bytes_per_s")}
        for entry in found["transports"]
        if entry["name"] == taken
    ]
    assert link == found["measured"]["link"]
    name, _, text = hand_off(found)
    assert [taken, taken] == [name, answer.headers["x-handoff-transport"]]
    assert f"requests take {taken}, as prefill prefers it; KV travels exact" == text


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_kv_that_requests_send_quantised_is_measured_quantised(tiny_model: Path, dtype: str) -> None:
    """Over tcp alone, as with requests. The doctor used to send exact KV, and was too pessimistic on slow links."""
    both = {"kv_wire": "int8", "kv_wire_max_error": 0.5, "dtype": dtype}
    with run_cluster(tiny_model, prefill=both | {"kv_transports": "tcp,shm"}, decode=both) as cluster:
        count = ("handoff_kv_received_wire_bytes_total", {"transport": "tcp", "kv_wire": "int8"})
        before = cluster.decode[0].metric(count[0], **count[1])  # the router's own probe
        found = examined(cluster)
        assert before < cluster.decode[0].metric(count[0], **count[1])
        answer = complete(cluster, random_prompt(200, seed=6), max_tokens=2, **GREEDY)

    name, entry, text = hand_off(found)
    assert ("tcp", "int8", "int8") == (name, entry["kv_wire"], answer.headers["x-handoff-kv-wire"])
    assert "KV travels as int8, " in text
    size, wire_bytes = list(entry["wire_bytes"].items())[-1]
    assert wire_bytes < int(size) * (0.4 if dtype == "float32" else 0.7)
    assert [None] == [other["kv_wire"] for other in found["transports"] if other["name"] == "shm"]


def test_what_one_side_alone_quantises_is_measured_exact(tiny_model: Path) -> None:
    """As a request's KV goes then."""
    one = {"kv_wire": "int8", "kv_wire_max_error": 0.5, "kv_transports": "tcp"}
    with run_cluster(tiny_model, prefill=one) as cluster:
        name, entry, text = hand_off(examined(cluster))

    assert ("tcp", None) == (name, entry["kv_wire"])
    assert text.endswith("KV travels exact")


def test_what_cannot_be_asked_is_a_problem_and_what_is_wrongly_said_is_usage(
    pd: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody there, roles swapped, a wrong secret: 1. No secret, no URL: 2."""
    prefill, decode = pd.prefill[0].url, pd.decode[0].url
    statuses = [
        run("http://127.0.0.1:1", decode, "--json")[0],
        run(decode, prefill, "--json")[0],
    ]
    monkeypatch.setenv("HANDOFF_SECRET", "another-secret-of-some-length")
    statuses.append(run(prefill, decode, "--json")[0])
    monkeypatch.delenv("HANDOFF_SECRET")
    statuses.append(run(prefill, decode, "--json")[0])
    statuses.append(CliRunner().invoke(app, ["doctor", "--prefill", prefill]).exit_code)

    assert [1, 1, 1, 2, 2] == statuses


def test_probe_routes_want_the_secret(pd: Cluster) -> None:
    """Measuring is work, so only the deployment itself may ask for it."""
    assert [401, 401, 401] == [
        http.post(f"{pd.prefill[0].url}/v1/prefill/probe", json={}).status_code,
        http.post(f"{pd.decode[0].url}/v1/decode/probe", json={}).status_code,
        http.get(f"{pd.decode[0].url}/v1/host").status_code,
    ]

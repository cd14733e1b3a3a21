"""`handoff kv` as its users meet it."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest
from safetensors.numpy import load_file
from typer.testing import CliRunner

from services.cli.main import app
from shared.kv.shape import KvShape
from tests.unit.shared.kv.blobs import Pool, encode, expected, manifest_for

SHAPE = KvShape(2, 1, 4, "F32")
WANT = expected(num_tokens=10, from_token=2, shape=SHAPE, num_choices=2)
BLOB = encode(manifest_for(WANT), Pool(SHAPE, num_tokens=10, seed=1))


@pytest.fixture
def blob(tmp_path: Path) -> Path:
    """A sound blob's file."""
    path = tmp_path / "sound.safetensors"
    path.write_bytes(BLOB)
    return path


@pytest.fixture
def damaged(tmp_path: Path) -> Path:
    """The same with one bit flipped in the last K or V, and one byte too many."""
    path = tmp_path / "damaged.safetensors"
    content = bytearray(BLOB)
    content[-8 * 11 - 2 - 16 - 1] ^= 0x40
    path.write_bytes(content + b"\0")
    return path


def run(*arguments: object) -> tuple[int, str, str]:
    """Exit status, stdout and stderr of `handoff kv ...`."""
    result = CliRunner().invoke(app, ["kv", *map(str, arguments)], prog_name="handoff")
    return result.exit_code, result.stdout, result.stderr


def row(table: str, first: str) -> list[str]:
    """The cells of the table's row that starts with `first`."""
    rows = ([cell.strip() for cell in line.strip("│").split("│")] for line in table.splitlines())
    return next(cells for cells in rows if cells[0] == first)


def test_inspect_shows_a_sound_blob(blob: Path) -> None:
    """Manifest, a row per chunk, first tokens, sizes and verdicts; nothing on stderr."""
    status, output, errors = run("inspect", blob)
    assert (0, "") == (status, errors)
    for text in (
        "h1, epoch 7",
        WANT.token_hash,
        "[2, 10) of 10 tokens; chunks: 2",
        "2 layers, 1 KV heads, head dim 4, F32",
        "512 bytes (0.00 MB)",
        f"{len(BLOB):,} bytes; header ",
        "100, 101 (ended)",
        "header ok, first_token ok, first_finished ok, digests ok",
        "sound: every digest is right",
    ):
        assert text in output
    rows = [line.split() for line in output.splitlines()]
    assert ["0", "[2,", "6)", "4", "[4,", "1,", "4]", "256", "4", "ok"] in rows
    assert "chunk.0000.layer.00.k" not in output


def test_inspect_all_shows_every_tensor(blob: Path) -> None:
    """A row each, names that safetensors finds in the same file."""
    status, output, _ = run("inspect", "--all", blob)
    assert 0 == status
    _, table, _ = output.split("\n\n")
    titles, *rows = [line.split() for line in table.splitlines()]
    assert ("tensor", "digest") == (titles[0], titles[-1])
    assert sorted((name, "ok") for name in load_file(blob)) == sorted((cells[0], cells[-1]) for cells in rows)


def test_inspect_json_is_the_whole_truth(blob: Path) -> None:
    """Numbers are numbers, shapes are those that safetensors sees, nothing else is on stdout."""
    status, output, errors = run("inspect", "--json", blob)
    assert (0, "") == (status, errors)
    told = json.loads(output)
    assert told["sound"] is True
    assert [] == told["problems"]
    assert len(BLOB) == told["file_bytes"]
    assert 2 * 2 * 1 * 4 * 8 * 4 == told["kv_bytes"]
    assert ([[2, 6], [6, 10]], 7, "F32") == tuple(told["manifest"][k] for k in ("chunks", "epoch", "dtype"))
    assert [(100, False), (101, True)] == [(t["token_id"], t["finished"]) for t in told["first_tokens"]]
    tensors = load_file(blob)
    assert {name: list(t.shape) for name, t in tensors.items()} == {
        t["name"]: t["shape"] for t in told["tensors"]
    }


def test_inspect_shows_what_is_damaged_and_fails(damaged: Path) -> None:
    """The table is still there; the exit status and the last lines tell."""
    status, output, _ = run("inspect", damaged)
    assert 1 == status
    assert "3 ok, 1 damaged" in output
    assert "problem: chunk.0001.layer.01.v is damaged, or its digest is" in output
    assert "problem: 1 bytes follow the blob's end" in output
    assert output.endswith("NOT SOUND\n")
    status, output, _ = run("inspect", "--json", damaged)
    assert 1 == status
    assert json.loads(output)["sound"] is False


def test_inspect_says_in_one_line_that_a_file_is_no_blob(tmp_path: Path) -> None:
    """On stderr, whatever form was asked for, even if the name has a line break."""
    path = tmp_path / "no\nblob"
    path.write_text("prose, not tensors")
    for form in ([], ["--json"], ["--all"]):
        status, output, errors = run("inspect", *form, path)
        assert (1, "") == (status, output)
        assert errors.startswith("handoff: ")
        assert "no KV blob" in errors
        assert 1 == errors.count("\n")


def test_verify_writes_one_line_per_file(blob: Path, damaged: Path, tmp_path: Path) -> None:
    """In order; one bad file fails all, and the others are still checked."""
    absent = tmp_path / "absent"
    status, output, errors = run("verify", damaged, absent, blob)
    assert (1, "") == (status, errors)
    assert [
        f"{damaged}: FAILED: 1 bytes follow the blob's end (and 1 more)",
        f"{absent}: FAILED: No such file or directory",
        f"{blob}: OK (h1, [2, 10) of 10 tokens, 0.00 MB of KV)",
    ] == output.splitlines()


def test_verify_succeeds_only_for_sound_files(blob: Path, damaged: Path) -> None:
    """Exit status 0 means that every digest of every file holds."""
    assert [0, 0, 1, 1] == [
        run("verify", *files)[0] for files in ([blob], [blob] * 2, [damaged], [blob, "x"])
    ]
    assert 2 == run("verify")[0]


def test_size_prints_the_known_table() -> None:
    """128 and 1,024 tokens in bfloat16, 1 MB = 2**20 bytes."""
    status, output, _ = run("size")
    assert 0 == status
    for name, attention, *sizes in (
        ("Qwen2.5-1.5B", "GQA", "3.50 MB", "28.00 MB"),
        ("Qwen2.5-7B", "GQA", "7.00 MB", "56.00 MB"),
        ("Llama-2-7b", "MHA", "64.00 MB", "512.00 MB"),
        ("falcon-7b", "MQA", "1.00 MB", "8.00 MB"),
        ("DeepSeek-V2-Lite", "MLA", "3.80 MB", "30.38 MB"),
    ):
        cells = row(output, name)
        assert [name, attention, *sizes] == [*cells[:2], *cells[4:]]


def test_size_of_one_model() -> None:
    """Tokens, dtype and item size are as asked; the item size wins."""
    one = ["size", "--model", "Qwen/Qwen2.5-1.5B-Instruct", "--tokens", 1024]
    for options, size in (
        ([], "28.00 MB"),
        (["--dtype", "f16"], "28.00 MB"),
        (["--dtype", "f32"], "56.00 MB"),
        (["--itemsize", 1], "14.00 MB"),
        (["--dtype", "f32", "--itemsize", 1], "14.00 MB"),
    ):
        status, output, _ = run(*one, *options)
        assert 0 == status
        assert size == row(output, "Qwen2.5-1.5B")[-1]
    told = json.loads(run(*one, "--tokens", 1, "--json")[1])
    assert {"1024": 28 * 1024 * 1024, "1": 28672} == told[0]["kv_bytes"]


def test_size_reads_a_config(tmp_path: Path) -> None:
    """A config.json or the folder that holds it, whatever it is called."""
    config = tmp_path / "config.json"
    config.write_text(
        json.dumps(
            {"num_hidden_layers": 2, "num_attention_heads": 4, "head_dim": 8, "num_key_value_heads": 1}
        )
    )
    for path in (config, tmp_path):
        told = json.loads(run("size", "--model", path, "--tokens", 3, "--json")[1])
        assert [(str(path), "MQA", {"3": 2 * 2 * 8 * 3 * 2})] == [
            (entry["model"], entry["attention"], entry["kv_bytes"]) for entry in told
        ]


def test_size_says_in_one_line_what_it_cannot_size(tmp_path: Path) -> None:
    """Unknown names get a hint; files that are no config say why."""
    (tmp_path / "config.json").write_text('{"num_hidden_layers": 2}')
    (tmp_path / "list.json").write_text("[]")
    (tmp_path / "bad.json").write_text("{")
    for model, message in (
        ("qwen2.5-1.6b", "did you mean Qwen2.5-1.5B"),
        ("zzz", "`handoff kv size` lists those that are known"),
        (tmp_path, "num_attention_heads is missing"),
        (tmp_path / "list.json", "not a JSON object"),
        (tmp_path / "bad.json", "cannot read"),
        ("x" * 300, "File name too long"),
    ):
        status, output, errors = run("size", "--model", model)
        assert (1, "") == (status, output)
        assert message in errors
        assert 1 == errors.count("\n")


@pytest.mark.parametrize("options", [["--tokens", 0], ["--itemsize", 0], ["--dtype", "int4"]])
def test_size_refuses_wrong_usage(options: list[object]) -> None:
    """Exit status 2 is the command line's own."""
    assert 2 == run("size", *options)[0]


def test_kv_loads_nothing_heavy() -> None:
    """A look into a file needs neither torch nor a web server."""
    heavy = ("torch", "transformers", "fastapi")
    code = f"import sys, services.cli.kv; print([m for m in {heavy} if m in sys.modules])"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert "[]\n" == done.stdout


def test_the_installed_command_knows_kv(blob: Path) -> None:
    """Help and a verdict through a real process."""
    command = [sys.executable, "-m", "services.cli.main", "kv"]
    told = subprocess.run([*command, "--help"], capture_output=True, text=True, check=True)
    assert "Usage: handoff kv" in told.stdout
    done = subprocess.run([*command, "verify", blob], capture_output=True, text=True, check=False)
    assert (0, "") == (done.returncode, done.stderr)
    assert f"{blob}: OK" in done.stdout

"""The one way by which processes get a model: a checkpoint folder whose weights are in the serving dtype.

    ensure_checkpoint   for workers: all of it, downloaded and converted if need be
    ensure_tokenizer    for the router: config, generation config and tokenizer are enough
    find_checkpoint     what is ready already, without making it

A checkpoint that already has the wanted dtype is used where it lies. Any other is converted once into the
cache, by one process while the others wait, and reused as long as its source has the same files, sizes and
times. Workers map the folder's weights into memory, so all workers of a host share one physical copy.
Torch-free: the conversion is a process of its own.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tempfile
from pathlib import Path

import xxhash

from shared.models.error import ModelError
from shared.models.files import read_json, small_files, weight_files
from shared.models.gguf_checkpoint import write_small_files
from shared.models.gguf_file import GgufFile
from shared.models.locate import Located, find, locate
from shared.models.numbers import FLOATS
from shared.models.safetensors_file import DTYPE_NAMES, read_specs
from shared.models.store import Report, make_entry

ORIGIN = "handoff.json"  # in every folder made here: where it comes from

_RECIPE = 1  # raise it when conversion changes its output: old entries are then not used any more
_HUB_SNAPSHOT = re.compile(r"^models--(.+)$")


def ensure_checkpoint(model: str, dtype_name: str, cache_dir: Path, report: Report) -> Path:
    """The folder of `model` with all weights in `dtype_name` (float32, bfloat16 or float16).

    Blocks: minutes when there is something to download or convert, milliseconds otherwise. `report` gets a
    line for every step worth telling. SIGTERM and Ctrl-C stop it and leave nothing half-written.
    Raises ModelError, with one clear line.
    """
    located = locate(model, cache_dir, report)
    if ready := _ready(located, dtype_name, cache_dir):
        return ready

    def make(partial: Path) -> None:
        report(f"converting {located.name} to {dtype_name}, once")
        _run_conversion(located.path, partial, dtype_name, report)
        _write_origin(partial, located, dtype_name)

    return make_entry(cache_dir, _entry(located, dtype_name), make, report=report)


def find_checkpoint(model: str, dtype_name: str, cache_dir: Path) -> Path | None:
    """What ensure_checkpoint would return at once; None if it had to download or convert. Uses no network.

    Raises ModelError.
    """
    located = find(model, cache_dir)
    return _ready(located, dtype_name, cache_dir) if located else None


def ensure_tokenizer(model: str, cache_dir: Path, report: Report) -> Path:
    """A folder with the config, generation config and tokenizer of `model`; its weights may be absent.

    Resolves `model` exactly as ensure_checkpoint does. Of a hub repository only the small files are downloaded;
    a GGUF file must be here whole, because its tokenizer is inside.
    Raises ModelError, with one clear line.
    """
    located = locate(model, cache_dir, report, weights=False)
    if not located.is_gguf:
        return located.path

    def make(partial: Path) -> None:
        report(f"reading the tokenizer of {located.name}")
        write_small_files(GgufFile(located.path), partial)
        _write_origin(partial, located, "tokenizer")

    return make_entry(cache_dir, _entry(located, "tokenizer"), make, report=report)


def model_name(folder: Path) -> str:
    """What to call the model in a folder that this module returned: hub id, GGUF name or folder name."""
    if (folder / ORIGIN).is_file():
        return str(read_json(folder / ORIGIN).get("name", folder.name))
    for part in folder.parts:
        if match := _HUB_SNAPSHOT.match(part):
            return match[1].replace("--", "/")
    return folder.name


def _ready(located: Located, dtype_name: str, cache_dir: Path) -> Path | None:
    """The folder to serve `located` from, if there is one already."""
    if dtype_name not in DTYPE_NAMES:
        raise ModelError(f"cannot serve in {dtype_name}: it is none of {', '.join(DTYPE_NAMES)}")
    if not located.is_gguf and _has_dtype(located.path, dtype_name):
        return located.path
    made = cache_dir / _entry(located, dtype_name)
    return made if made.is_dir() else None


def _has_dtype(folder: Path, dtype_name: str) -> bool:
    """Whether no float tensor has another dtype. Raises ModelError for a quantised checkpoint."""
    if "quantization_config" in read_json(folder / "config.json"):
        raise ModelError(
            f"{folder} is a quantised checkpoint; only float32, bfloat16 and float16 can be served"
        )
    dtypes = {spec.dtype for path in weight_files(folder) for spec in read_specs(path)}
    return dtypes & FLOATS == {DTYPE_NAMES[dtype_name]}


def _entry(located: Located, kind: str) -> str:
    files = [located.path] if located.is_gguf else [*small_files(located.path), *weight_files(located.path)]
    key = xxhash.xxh3_64()
    key.update(str(_RECIPE).encode())
    for path in files:
        facts = path.stat()
        key.update(f"/{path.name}:{facts.st_size}:{facts.st_mtime_ns}".encode())
    readable = re.sub(r"[^\w.-]+", "-", located.name)
    return f"checkpoints/{readable}-{kind}-{key.hexdigest()}"


def _write_origin(folder: Path, located: Located, kind: str) -> None:
    origin = {"name": located.name, "source": str(located.path), "kind": kind}
    (folder / ORIGIN).write_text(json.dumps(origin, indent=2) + "\n")


def _run_conversion(source: Path, target: Path, dtype_name: str, report: Report) -> None:
    command = [sys.executable, "-m", "shared.models.convert", str(source), str(target), dtype_name]
    with (
        tempfile.TemporaryFile("w+") as errors,
        subprocess.Popen(
            command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=errors, text=True
        ) as process,
    ):
        assert process.stdout is not None
        try:
            for line in process.stdout:
                report(line.rstrip())
            process.wait()
        except BaseException:
            process.kill()
            raise
        if process.returncode:
            errors.seek(0)
            lines = [line.strip() for line in errors if line.strip()]
            reason = lines[-1] if lines else f"it ended with status {process.returncode}"
            raise ModelError(f"cannot convert {source.name}: {reason}")

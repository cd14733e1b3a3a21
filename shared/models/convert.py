"""Makes a checkpoint folder in the serving dtype, from a GGUF file or from a checkpoint in another dtype.

Runs as a process of its own (`python -m shared.models.convert SOURCE TARGET DTYPE`), so that its memory is
given back and a stuck conversion can be ended. Stdout: lines for people. Failure: one line on stderr and exit
status 1. It ends when its stdin is closed, which happens when the process that started it dies.
"""

from __future__ import annotations

import json
import os
import shutil
import sys
import threading
from collections.abc import Iterable, Iterator
from pathlib import Path

import torch
from safetensors import safe_open

from shared.models.error import ModelError
from shared.models.files import SINGLE, read_json, small_files, weight_files
from shared.models.gguf_checkpoint import checkpoint_name, require_qwen2, write_small_files
from shared.models.gguf_file import GgufFile
from shared.models.safetensors_file import DTYPE_NAMES, TensorSpec, read_specs, write_tensors
from shared.models.store import Report, require_space

_FLOATS = frozenset({"F64", *DTYPE_NAMES.values()})


def convert(source: Path, target: Path, dtype_name: str, report: Report) -> None:
    """Fill the new folder `target`. Raises ModelError or OSError; the caller removes what is half-written."""
    target.mkdir(parents=True)
    if source.is_dir():
        _convert_folder(source, target, dtype_name, report)
    else:
        _convert_gguf(source, target, dtype_name, report)


def _convert_gguf(path: Path, target: Path, dtype_name: str, report: Report) -> None:
    source = GgufFile(path)
    require_qwen2(source)
    report(f"converting {path.name}: tokenizer and configs")
    write_small_files(source, target)
    _set_dtype(target, dtype_name)
    dtype, code = getattr(torch, dtype_name), DTYPE_NAMES[dtype_name]
    specs = [TensorSpec(checkpoint_name(t.name), code, t.shape) for t in source.tensors.values()]

    def data() -> Iterator[memoryview]:
        for number, name in enumerate(source.tensors, start=1):
            if number % 50 == 1:
                report(f"converting {path.name}: tensor {number} of {len(specs)}")
            for piece in source.pieces(name):
                yield _bytes_of(torch.from_numpy(piece).to(dtype))

    _write(target, specs, data())


def _convert_folder(source: Path, target: Path, dtype_name: str, report: Report) -> None:
    for path in small_files(source):
        shutil.copyfile(path, target / path.name)
    _set_dtype(target, dtype_name)
    dtype, code = getattr(torch, dtype_name), DTYPE_NAMES[dtype_name]
    files = {path: read_specs(path) for path in weight_files(source)}
    specs = [
        TensorSpec(spec.name, code if spec.dtype in _FLOATS else spec.dtype, spec.shape)
        for file_specs in files.values()
        for spec in file_specs
    ]

    def data() -> Iterator[memoryview]:
        for number, (path, file_specs) in enumerate(files.items(), start=1):
            report(f"converting {source.name} to {dtype_name}: file {number} of {len(files)}")
            with safe_open(path, framework="pt") as tensors:
                for spec in file_specs:
                    tensor = tensors.get_tensor(spec.name)
                    yield _bytes_of(tensor.to(dtype) if spec.dtype in _FLOATS else tensor)

    _write(target, specs, data())


def _write(target: Path, specs: list[TensorSpec], data: Iterable[memoryview]) -> None:
    require_space(target, sum(spec.num_bytes for spec in specs))
    write_tensors(target / SINGLE, specs, data)


def _set_dtype(folder: Path, dtype_name: str) -> None:
    config = read_json(folder / "config.json")
    config.pop("torch_dtype", None)  # the older name of the same key
    (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype_name}, indent=2) + "\n")


def _bytes_of(tensor: torch.Tensor) -> memoryview:
    return tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data


def _end_with_parent() -> None:
    # NOTE: not sys.stdin, whose lock this thread would hold when the interpreter ends, which is a fatal error.
    os.read(0, 1)
    os._exit(1)


def _say(line: str) -> None:
    sys.stdout.write(line + "\n")
    sys.stdout.flush()


def main(arguments: list[str]) -> int:
    """Run one conversion; return the exit status."""
    source, target, dtype_name = arguments
    threading.Thread(target=_end_with_parent, name="end-with-parent", daemon=True).start()
    torch.set_num_threads(1)
    try:
        convert(Path(source), Path(target), dtype_name, _say)
    except (ModelError, OSError) as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

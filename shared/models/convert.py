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

from shared.models.error import ModelError
from shared.models.files import SINGLE, read_json, small_files, weight_files
from shared.models.gguf_checkpoint import checkpoint_name, require_qwen2, write_small_files
from shared.models.gguf_file import GgufFile
from shared.models.numbers import FLOATS, from_float32, to_float32
from shared.models.safetensors_file import DTYPE_NAMES, TensorSpec, read_specs, tensor_bytes, write_tensors
from shared.models.store import Report, require_space

_TELL_EVERY = 50
_PIECE_BYTES = 8 << 20


def convert(source: Path, target: Path, dtype_name: str, report: Report) -> None:
    """Fill the new folder `target`. Raises ModelError or OSError; the caller removes what is half-written."""
    target.mkdir(parents=True)
    dtype = DTYPE_NAMES[dtype_name]
    if source.is_dir():
        _convert_folder(source, target, dtype, report)
    else:
        _convert_gguf(source, target, dtype, report)
    _set_dtype(target, dtype_name)


def _convert_gguf(path: Path, target: Path, dtype: str, report: Report) -> None:
    source = GgufFile(path)
    require_qwen2(source)
    report(f"converting {path.name}: tokenizer and configs")
    write_small_files(source, target)
    specs = [TensorSpec(checkpoint_name(t.name), dtype, t.shape) for t in source.tensors.values()]

    def data() -> Iterator[memoryview]:
        for number, name in enumerate(source.tensors, start=1):
            if number % _TELL_EVERY == 1:
                report(f"converting {path.name}: tensor {number} of {len(specs)}")
            for piece in source.pieces(name):
                yield from_float32(piece, dtype)

    _write(target, specs, data())


def _convert_folder(source: Path, target: Path, dtype: str, report: Report) -> None:
    for path in small_files(source):
        shutil.copyfile(path, target / path.name)
    files = {path: read_specs(path) for path in weight_files(source)}
    specs = [
        TensorSpec(spec.name, dtype if spec.dtype in FLOATS else spec.dtype, spec.shape)
        for file_specs in files.values()
        for spec in file_specs
    ]

    def data() -> Iterator[memoryview]:
        for number, (path, file_specs) in enumerate(files.items(), start=1):
            report(f"converting {source.name}: file {number} of {len(files)}")
            for spec, raw in zip(file_specs, tensor_bytes(path), strict=True):
                for start in range(0, raw.size, _PIECE_BYTES):
                    piece = raw[start : start + _PIECE_BYTES]
                    yield (
                        from_float32(to_float32(piece, spec.dtype), dtype)
                        if spec.dtype in FLOATS
                        else piece.data
                    )

    _write(target, specs, data())


def _write(target: Path, specs: list[TensorSpec], data: Iterable[memoryview]) -> None:
    require_space(target, sum(spec.num_bytes for spec in specs))
    write_tensors(target / SINGLE, specs, data)


def _set_dtype(folder: Path, dtype_name: str) -> None:
    config = read_json(folder / "config.json")
    config.pop("torch_dtype", None)  # the older name of the same key
    (folder / "config.json").write_text(json.dumps(config | {"dtype": dtype_name}, indent=2) + "\n")


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
    try:
        convert(Path(source), Path(target), dtype_name, _say)
    except (ModelError, OSError) as exc:
        sys.stderr.write(f"{exc}\n")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))

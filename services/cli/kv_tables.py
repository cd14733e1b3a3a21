"""A checked blob as `handoff kv` shows it: one line, tables for people, JSON for programs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from services.cli.kv_blob import BlobCheck, TensorCheck
from services.cli.kv_text import megabytes, one_line
from shared.kv.manifest import Manifest


def verify_line(path: Path, check: BlobCheck) -> str:
    """One line per file; of several problems the first."""
    if check.sound:
        manifest = check.layout.manifest
        what = f"{manifest.handoff_id}, {_positions(manifest)}, {megabytes(check.layout.kv_bytes)} of KV"
        return f"{one_line(path)}: OK ({what})"
    more = f" (and {len(check.problems) - 1} more)" if len(check.problems) > 1 else ""
    return f"{one_line(path)}: FAILED: {check.problems[0]}{more}"


def print_check(out: Console, path: Path, check: BlobCheck, *, all_tensors: bool) -> None:
    """Manifest, a row per chunk (or per tensor), and whether it is sound."""
    out.print(_grid([("file", one_line(path)), *_facts(check)]))
    out.print()
    out.print(_tensor_table(check.tensors()) if all_tensors else _chunk_table(check))
    out.print()
    for problem in check.problems:
        out.print(f"problem: {problem}")
    out.print("sound: every digest is right" if check.sound else "NOT SOUND")


def check_as_json(path: Path, check: BlobCheck) -> dict[str, Any]:
    """The same with every tensor; sizes in bytes, positions half-open, digests as hex."""
    layout, first = check.layout, check.first
    return {
        "file": str(path),
        "sound": check.sound,
        "problems": list(check.problems),
        "file_bytes": check.file_bytes,
        "header_bytes": check.header_bytes,
        "kv_bytes": layout.kv_bytes,
        "kv_wire_bytes": layout.kv_wire_bytes,
        "trailer_bytes": layout.trailer_bytes,
        "header": check.header,
        "manifest": _manifest_as_json(layout.manifest),
        "request": None if check.saved is None else check.saved.model_dump(mode="json"),
        "first_tokens": None
        if first is None
        else [
            {"choice": choice, "token_id": token_id, "finished": finished}
            for choice, (token_id, finished) in enumerate(zip(first.token_ids, first.finished, strict=True))
        ],
        "tensors": [
            {
                "name": tensor.span.name,
                "dtype": tensor.span.dtype,
                "shape": list(tensor.span.shape),
                "data_offsets": [tensor.span.begin, tensor.span.end],
                "xxh3_64": _hex(tensor.digest),
                "verdict": tensor.verdict,
            }
            for tensor in check.tensors()
        ],
    }


def _facts(check: BlobCheck) -> Iterator[tuple[str, str]]:
    layout, manifest, shape = check.layout, check.layout.manifest, check.layout.manifest.shape
    if check.saved is not None:
        saved = check.saved
        yield "request", f"{saved.work.request_id}, computed by {saved.worker} with {saved.model}"
        how = f" as {saved.kv_wire}" if saved.kv_wire else ""
        yield "travelled", f"[{saved.sent_from}, {manifest.num_tokens}){how}; decode held what comes before"
    yield "hand-off", f"{manifest.handoff_id}, epoch {manifest.epoch}"
    yield "fingerprint", manifest.fingerprint
    yield "token hash", manifest.token_hash
    yield "positions", f"{_positions(manifest)}; chunks: {len(manifest.chunks)}"
    yield (
        "shape",
        f"{shape.num_layers} layers, {shape.num_kv_heads} KV heads, head dim {shape.head_dim}, {shape.dtype}",
    )
    yield "K and V", f"{layout.kv_bytes:,} bytes ({megabytes(layout.kv_bytes)})"
    if manifest.kv_wire is not None:
        share = f"{layout.kv_wire_bytes / max(layout.kv_bytes, 1):.0%}"
        yield "quantised", f"{manifest.kv_wire}, {layout.kv_wire_bytes:,} bytes, {share} of that"
    yield (
        "file size",
        f"{check.file_bytes:,} bytes; header {check.header_bytes:,}, trailer {layout.trailer_bytes:,}",
    )
    yield "first tokens", _first(check)
    trailer = ", ".join(f"{tensor.span.name} {tensor.verdict}" for tensor in check.trailer)
    yield "digests", f"header {check.header}, {trailer}"


def _positions(manifest: Manifest) -> str:
    return f"[{manifest.from_token}, {manifest.num_tokens}) of {manifest.num_tokens} tokens"


def _first(check: BlobCheck) -> str:
    if check.first is None:
        return "missing"
    pairs = zip(check.first.token_ids, check.first.finished, strict=True)
    return ", ".join(f"{token} (ended)" if finished else str(token) for token, finished in pairs)


def _chunk_table(check: BlobCheck) -> Table:
    table = _table("chunk", "positions", "K and V tensors", "each", "bytes", "digests")
    chunks = zip(check.layout.manifest.chunks, check.chunks, strict=True)
    for index, ((start, end), tensors) in enumerate(chunks):
        nbytes = sum(tensor.span.nbytes for tensor in tensors)
        shape = _shape(tensors[0])
        table.add_row(
            str(index), f"[{start}, {end})", str(len(tensors)), shape, f"{nbytes:,}", _verdicts(tensors)
        )
    return table


def _tensor_table(tensors: Iterable[TensorCheck]) -> Table:
    table = _table("tensor", "dtype", "shape", "offset", "bytes", "xxh3_64", "digest")
    for tensor in tensors:
        span = tensor.span
        sizes = (f"{span.begin:,}", f"{span.nbytes:,}")
        table.add_row(
            span.name, span.dtype, _shape(tensor), *sizes, _hex(tensor.digest) or "-", tensor.verdict
        )
    return table


def _verdicts(tensors: Iterable[TensorCheck]) -> str:
    return ", ".join(f"{count} {verdict}" for verdict, count in Counter(t.verdict for t in tensors).items())


def _shape(tensor: TensorCheck) -> str:
    return str(list(tensor.span.shape))


def _hex(digest: int | None) -> str | None:
    return None if digest is None else f"{digest:016x}"


def _manifest_as_json(manifest: Manifest) -> dict[str, Any]:
    numbers = {name: int(text) if text.isdecimal() else text for name, text in manifest.to_metadata().items()}
    return numbers | {"chunks": [list(chunk) for chunk in manifest.chunks]}


def _table(*titles: str) -> Table:
    table = Table(box=None, pad_edge=False)
    for title in titles:
        table.add_column(title, justify="right" if title in ("bytes", "offset") else "left", overflow="fold")
    return table


def _grid(rows: Iterable[tuple[str, str]]) -> Table:
    grid = Table.grid(padding=(0, 2))
    grid.add_column()
    grid.add_column(overflow="fold")
    for row in rows:
        grid.add_row(*row)
    return grid

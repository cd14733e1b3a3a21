"""A hand-off's blob in a file: read front to back in bounded memory, everything that it claims checked.

Memory: the header's JSON (bounded by what a receiver takes), one read buffer, and one line of facts per tensor.
"""

from __future__ import annotations

import os
import stat
import struct
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from typing import Literal

from xxhash import xxh3_64, xxh3_64_intdigest

from shared.errors import HandoffError, InvalidRequest
from shared.kv.header import LENGTH, json_length
from shared.kv.layout import BlobLayout, TensorSpan
from shared.kv.limits import ReceiveLimits
from shared.kv.progress import FirstTokens
from shared.kv.quant_layout import QuantLayout, blob_layout
from shared.kv.saved import SavedRequest, parse_saved_header

# "unchecked": the bytes are there, but what their digest should be is not. "missing": not all bytes are there.
Verdict = Literal["ok", "damaged", "unchecked", "missing"]

_BUFFER_BYTES = 1024 * 1024
_NUM_TRAILER_TENSORS = 3
_MAX_TOKEN_ID = 2**31


class NoBlob(Exception):
    """The file cannot be read as a blob of KV. The text is one clear line, without the file's name."""


@dataclass(frozen=True, slots=True)
class TensorCheck:
    """One tensor as found. digest: xxh3_64 of its bytes in the file; None where they are not all there."""

    span: TensorSpan
    digest: int | None
    verdict: Verdict


@dataclass(frozen=True, slots=True)
class BlobCheck:
    """Everything that a file says and whether it is true. chunks, trailer: in the order of the layout.

    first: None if the file ends before it. saved: the request, if the file names it.
    problems: one line each; none means that the blob is sound.
    """

    file_bytes: int
    header_bytes: int
    layout: BlobLayout
    header: Verdict
    chunks: tuple[tuple[TensorCheck, ...], ...]
    trailer: tuple[TensorCheck, ...]
    first: FirstTokens | None
    saved: SavedRequest | None
    problems: tuple[str, ...]

    @property
    def sound(self) -> bool:
        """A decode worker that reserved for it would accept these bytes."""
        return not self.problems

    def tensors(self) -> Iterator[TensorCheck]:
        """Every tensor in file order."""
        for chunk in self.chunks:
            yield from chunk
        yield from self.trailer


def check_blob(path: Path) -> BlobCheck:
    """Read the whole file once. Raises NoBlob if there is no manifest to hold it against."""
    try:
        # NOTE: opening a FIFO would wait for a writer.
        if not stat.S_ISREG(path.stat().st_mode):
            raise NoBlob("not a regular file")
        with path.open("rb") as file:
            return _check(file, os.fstat(file.fileno()).st_size)
    except OSError as exc:
        raise NoBlob(exc.strerror or "cannot be read") from exc


def _check(file: BufferedReader, file_bytes: int) -> BlobCheck:
    header, layout, saved = _read_header(file)
    buffer = memoryview(bytearray(min(_BUFFER_BYTES, file_bytes)))
    digests = [_digest(file, span.nbytes, buffer) for span in layout.kv_spans()]
    trailer = file.read(layout.trailer_bytes)
    parts = _cut_trailer(layout, trailer)
    digests += [None if part is None else xxh3_64_intdigest(part) for part in parts]
    claimed: Sequence[int | None] = [None] * layout.num_digests
    if parts[-1] is not None:
        claimed = struct.unpack(f"<{layout.num_digests}Q", parts[-1])
    *claimed_tensors, claimed_header = claimed
    header_verdict = _verdict(xxh3_64_intdigest(header), claimed_header)
    verdicts = [header_verdict, *map(_verdict, digests[:-1], claimed_tensors)]
    # The digests have none of their own: they are right if everything is as they say.
    verdicts.append("missing" if parts[-1] is None else "unchecked" if "damaged" in verdicts else "ok")
    checks = [
        TensorCheck(span, digest, verdict)
        for span, digest, verdict in zip(layout.spans(), digests, verdicts[1:], strict=True)
    ]
    surplus_bytes = file_bytes - len(header) - layout.data_bytes
    problems = [*_problems(surplus_bytes, header_verdict, checks), *_trailer_problems(parts)]
    size = layout.manifest.shape.num_tensors * layout.spans_per_tensor
    num_kv = len(checks) - _NUM_TRAILER_TENSORS
    return BlobCheck(
        file_bytes=file_bytes,
        header_bytes=len(header),
        layout=layout,
        header=header_verdict,
        chunks=tuple(tuple(checks[at : at + size]) for at in range(0, num_kv, size)),
        trailer=tuple(checks[num_kv:]),
        first=_first_tokens(parts),
        saved=saved,
        problems=tuple(problems),
    )


def _read_header(file: BufferedReader) -> tuple[bytes, BlobLayout, SavedRequest | None]:
    """The file's first bytes and what they imply; no length in them is believed beyond its bound."""
    prefix = file.read(LENGTH.size)
    if len(prefix) < LENGTH.size:
        raise NoBlob("no KV blob: too short for a header")
    try:
        content = file.read(length := json_length(prefix, ReceiveLimits().max_header_bytes))
        if len(content) < length:
            raise NoBlob("no KV blob: the file ends within its header")
        manifest, entries, saved = parse_saved_header(content)
        # Before the layout lists them all: a manifest can claim any number of layers.
        spans_per_tensor = (BlobLayout if manifest.kv_wire is None else QuantLayout).spans_per_tensor
        implied = len(manifest.chunks) * manifest.shape.num_tensors * spans_per_tensor
        implied += _NUM_TRAILER_TENSORS
        if len(entries) != implied:
            raise NoBlob(f"the header lists {len(entries)} tensors, its manifest implies {implied}")
        layout = blob_layout(manifest)
        layout.check_entries(entries)
    except (InvalidRequest, HandoffError) as exc:
        raise NoBlob(f"no KV blob: {exc.message}") from exc
    return prefix + content, layout, saved


def _digest(file: BufferedReader, nbytes: int, buffer: memoryview) -> int | None:
    """xxh3_64 of the next bytes; None if there are fewer."""
    digest = xxh3_64()
    while nbytes:
        taken = file.readinto(buffer[: min(nbytes, len(buffer))])
        if not taken:
            return None
        digest.update(buffer[:taken])
        nbytes -= taken
    return digest.intdigest()


def _cut_trailer(layout: BlobLayout, trailer: bytes) -> list[bytes | None]:
    """First tokens, flags and digests; None for what is not all there."""
    base = layout.kv_wire_bytes
    return [
        trailer[span.begin - base : span.end - base] if span.end - base <= len(trailer) else None
        for span in layout.trailer
    ]


def _verdict(digest: int | None, claimed: int | None) -> Verdict:
    if digest is None:
        return "missing"
    if claimed is None:
        return "unchecked"
    return "ok" if digest == claimed else "damaged"


def _first_tokens(parts: Sequence[bytes | None]) -> FirstTokens | None:
    tokens, flags = parts[0], parts[1]
    if tokens is None or flags is None:
        return None
    return FirstTokens(struct.unpack(f"<{len(flags)}q", tokens), tuple(flag != 0 for flag in flags))


def _problems(surplus_bytes: int, header: Verdict, checks: Sequence[TensorCheck]) -> Iterator[str]:
    if surplus_bytes < 0:
        yield f"the file ends {-surplus_bytes:,} bytes too early"
    elif surplus_bytes > 0:
        yield f"{surplus_bytes:,} bytes follow the blob's end"
    if surplus_bytes >= 0 and any(check.verdict == "missing" for check in checks):
        yield "the file shrank while it was read"
    if header == "damaged":
        yield "the header is damaged, or its digest is"
    for check in checks:
        if check.verdict == "damaged":
            yield f"{check.span.name} is damaged, or its digest is"


def _trailer_problems(parts: Sequence[bytes | None]) -> Iterator[str]:
    first = _first_tokens(parts)
    if first is not None and not all(0 <= token < _MAX_TOKEN_ID for token in first.token_ids):
        yield "the first tokens are no token ids"
    if parts[1] is not None and not set(parts[1]) <= {0, 1}:
        yield "the flags of the first tokens are neither 0 nor 1"

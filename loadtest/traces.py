"""Traces of production services: when requests came and how long they were. No prompt text in them.

Two public formats are read, plain or gzipped: Azure 2023 (CSV: TIMESTAMP, ContextTokens, GeneratedTokens) and
Mooncake (JSON lines: timestamp in ms, input_length, output_length, hash_ids of 512-token blocks). Slices of
both are shipped in data/ and go by a short name.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path

MOONCAKE_BLOCK_TOKENS = 512
MAX_SCALE = 1000.0
_MAX_TOKENS = 100_000_000  # of one prompt or answer; more is a damaged line

SHIPPED = {
    "azure-conv": "azure_conv_2023.csv",
    "azure-code": "azure_code_2023.csv",
    "mooncake": "mooncake_conversation.jsonl",
}


class BadTrace(ValueError):
    """A trace file cannot be read; the text says which line and why."""


@dataclass(frozen=True, slots=True)
class TraceRow:
    """One request of a trace. arrival_s counts from the first one.

    blocks: ids of the prompt's blocks of `block_tokens` tokens each, the last one perhaps not full; equal
    ids stand for equal tokens. None if the trace does not tell.
    """

    arrival_s: float
    prompt_tokens: int
    output_tokens: int
    blocks: tuple[int, ...] | None = None
    block_tokens: int = MOONCAKE_BLOCK_TOKENS


@dataclass(frozen=True, slots=True)
class Scale:
    """How a trace is made smaller for a small machine. 0.1 means a tenth: of the time, of the lengths."""

    time: float = 1.0
    length: float = 1.0

    def __post_init__(self) -> None:
        if not (0 < self.time <= MAX_SCALE and 0 < self.length <= MAX_SCALE):
            raise ValueError(f"a trace is scaled by positive numbers up to {MAX_SCALE:g}")

    def apply(self, row: TraceRow) -> TraceRow:
        """The scaled row; no length falls below one token. Blocks keep their ids and shrink alike."""
        arrival_s = row.arrival_s * self.time
        output_tokens = _scaled(row.output_tokens, self.length)
        if row.blocks is None:
            prompt_tokens = _scaled(row.prompt_tokens, self.length)
            return replace(row, arrival_s=arrival_s, prompt_tokens=prompt_tokens, output_tokens=output_tokens)
        block_tokens = _scaled(row.block_tokens, self.length)
        full, rest = divmod(row.prompt_tokens, row.block_tokens)
        tail = min(block_tokens, _scaled(rest, self.length)) if rest else 0
        return TraceRow(arrival_s, full * block_tokens + tail, output_tokens, row.blocks, block_tokens)


def find(name_or_path: str) -> Path:
    """A shipped slice by its short name, else a path. Raises BadTrace if there is no such file."""
    path = (
        Path(__file__).parent / "data" / SHIPPED[name_or_path]
        if name_or_path in SHIPPED
        else Path(name_or_path)
    )
    if not path.is_file():
        raise BadTrace(f"no trace {name_or_path!r}: not a file, and not one of {', '.join(SHIPPED)}")
    return path


def read(path: Path, *, limit: int | None = None) -> list[TraceRow]:
    """The first `limit` requests in order of arrival, the first at 0 s. The format is told by the first byte.

    Raises BadTrace for a file that is neither format, a bad line, or one without requests.
    """
    opener = gzip.open if path.suffix == ".gz" else open
    try:
        with opener(path, "rt", encoding="utf-8", newline="") as file:
            lines = file.read().splitlines()
    except (OSError, UnicodeDecodeError, EOFError) as exc:
        raise BadTrace(f"{path.name}: {exc}") from exc
    rows = read_mooncake(lines) if lines and lines[0].lstrip().startswith("{") else read_azure(lines)
    if not rows:
        raise BadTrace(f"{path.name}: no requests in it")
    rows = sorted(rows, key=lambda row: row.arrival_s)[:limit]
    return [replace(row, arrival_s=row.arrival_s - rows[0].arrival_s) for row in rows]


def read_azure(lines: Sequence[str]) -> list[TraceRow]:
    """Azure 2023: wall-clock times with seven digits after the second."""
    rows: list[TraceRow] = []
    reader = csv.DictReader(io.StringIO("\n".join(lines)))
    try:
        for raw in reader:
            arrival_s = _azure_time_s(raw["TIMESTAMP"])
            rows.append(_row(arrival_s, int(raw["ContextTokens"]), int(raw["GeneratedTokens"])))
    except (KeyError, ValueError, TypeError, OverflowError) as exc:
        raise BadTrace(f"line {reader.line_num}: not an Azure 2023 trace line ({exc})") from exc
    return rows


def read_mooncake(lines: Iterable[str]) -> list[TraceRow]:
    """Mooncake: milliseconds from the start of the trace, and the ids of the prompt's blocks."""
    rows: list[TraceRow] = []
    for number, line in enumerate(lines, start=1):
        if not line.strip():
            continue
        try:
            raw = json.loads(line)
            blocks = tuple(int(block) for block in raw["hash_ids"])
            row = _row(float(raw["timestamp"]) / 1000, int(raw["input_length"]), int(raw["output_length"]))
            if len(blocks) != -(-row.prompt_tokens // MOONCAKE_BLOCK_TOKENS):
                raise ValueError(f"{len(blocks)} blocks for {row.prompt_tokens} tokens")
        except (KeyError, ValueError, TypeError, OverflowError) as exc:
            raise BadTrace(f"line {number}: not a Mooncake trace line ({exc})") from exc
        rows.append(replace(row, blocks=blocks))
    return rows


def _row(arrival_s: float, prompt_tokens: int, output_tokens: int) -> TraceRow:
    if prompt_tokens < 1:
        raise ValueError("a prompt of no tokens")
    if prompt_tokens > _MAX_TOKENS or output_tokens > _MAX_TOKENS or not math.isfinite(arrival_s):
        raise ValueError("a number that cannot be")
    return TraceRow(arrival_s, prompt_tokens, max(1, output_tokens))


def _azure_time_s(text: str) -> float:
    whole, _, fraction = text.partition(".")
    moment = datetime.strptime(whole, "%Y-%m-%d %H:%M:%S").replace(tzinfo=UTC)
    return moment.timestamp() + float(f"0.{fraction or 0}")


def _scaled(tokens: int, by: float) -> int:
    return max(1, round(tokens * by))

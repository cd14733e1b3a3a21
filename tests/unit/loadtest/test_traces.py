"""Traces are read exactly, scaled as told, and a bad line is named."""

from __future__ import annotations

import gzip
import json
from itertools import pairwise
from pathlib import Path

import pytest

from loadtest.traces import SHIPPED, BadTrace, Scale, TraceRow, find, read

AZURE = """TIMESTAMP,ContextTokens,GeneratedTokens
2023-11-16 18:15:46.6805900,374,44
2023-11-16 18:15:50.9951690,396,0
"""


def mooncake(timestamp: int, prompt: int, blocks: list[int], output: int = 8) -> str:
    """One line of a Mooncake trace."""
    row = {"timestamp": timestamp, "input_length": prompt, "output_length": output, "hash_ids": blocks}
    return json.dumps(row) + "\n"


@pytest.mark.parametrize("name", SHIPPED)
def test_shipped_slices_are_readable(name: str) -> None:
    """Each short name gives 200 requests in order of arrival, the first at 0 s."""
    rows = read(find(name))
    assert len(rows) == 200
    assert rows[0].arrival_s == 0.0
    assert all(a.arrival_s <= b.arrival_s for a, b in pairwise(rows))
    assert (name == "mooncake") == (rows[0].blocks is not None)


def test_azure_times_have_seven_digits(tmp_path: Path) -> None:
    """Arrival counts from the first request; an answer of no tokens becomes one token."""
    path = tmp_path / "a.csv"
    path.write_text(AZURE)
    first, second = read(path)
    assert (first.prompt_tokens, first.output_tokens, first.blocks) == (374, 44, None)
    assert second.arrival_s == pytest.approx(4.314579, abs=1e-5)
    assert second.output_tokens == 1


def test_gzip_and_limit(tmp_path: Path) -> None:
    """Whole public files are gzipped; a limit takes the first requests by arrival, not by line."""
    path = tmp_path / "m.jsonl.gz"
    with gzip.open(path, "wt") as file:
        file.write(mooncake(9000, 100, [3]) + mooncake(2000, 513, [1, 2]))
    assert read(path, limit=1) == [TraceRow(0.0, 513, 8, (1, 2))]


def test_scaling_keeps_blocks_aligned() -> None:
    """Blocks shrink with the prompt, so a shared block stays one, and the last one stays partly full."""
    row = TraceRow(10.0, 512 * 2 + 256, 64, (7, 8, 9))
    assert Scale(0.5, 1 / 16).apply(row) == TraceRow(5.0, 32 * 2 + 16, 4, (7, 8, 9), 32)
    assert Scale(1, 0.001).apply(row) == TraceRow(10.0, 3, 1, (7, 8, 9), 1)
    assert Scale(1, 0.001).apply(TraceRow(0.0, 3, 3)) == TraceRow(0.0, 1, 1)


@pytest.mark.parametrize("factors", [(0, 1), (1, 0), (-1, 1), (float("nan"), 1)])
def test_a_scale_is_positive(factors: tuple[float, float]) -> None:
    """A trace cannot be scaled to nothing."""
    with pytest.raises(ValueError, match="positive"):
        Scale(*factors)


@pytest.mark.parametrize(
    ("text", "why"),
    [
        ("", "no requests"),
        ("TIMESTAMP,ContextTokens,GeneratedTokens\n", "no requests"),
        ("a,b\n1,2\n", "line 2: not an Azure"),
        (AZURE + "yesterday,1,1\n", "line 4: not an Azure"),
        (AZURE + "2023-11-16 18:15:50.9,0,1\n", "line 4: .* no tokens"),
        ('{"timestamp": 1}\n', "line 1: not a Mooncake"),
        (mooncake(0, 512, [1]) + "{half\n", "line 2: not a Mooncake"),
        (mooncake(0, 513, [1]), "1 blocks for 513 tokens"),
    ],
)
def test_a_bad_trace_is_refused_with_its_line(tmp_path: Path, text: str, why: str) -> None:
    """No row is skipped in silence."""
    path = tmp_path / "trace"
    path.write_text(text)
    with pytest.raises(BadTrace, match=why):
        read(path)


def test_a_missing_trace_names_the_shipped_ones(tmp_path: Path) -> None:
    """A typing error is answered with what there is."""
    with pytest.raises(BadTrace, match="azure-conv, azure-code, mooncake"):
        find(str(tmp_path / "none.csv"))


def test_a_damaged_gzip_is_a_bad_trace(tmp_path: Path) -> None:
    """A truncated download is one clear error."""
    path = tmp_path / "a.csv.gz"
    path.write_bytes(gzip.compress(AZURE.encode() * 50)[:60])
    with pytest.raises(BadTrace, match=r"a\.csv\.gz"):
        read(path)

"""The compiled code copies and digests as numpy and xxhash do, and stays within the pieces that it was given."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import zipfile
from contextlib import nullcontext
from importlib.machinery import ModuleSpec
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from xxhash import xxh3_64_intdigest

from shared.errors import InvariantBroken
from shared.kv import copy_rows
from shared.kv.copy_rows import CopyRows, Moves, Pieces, Place, compiled, moves_between
from shared.kv.pool_memory import Rows

ROOT = Path(__file__).resolve().parents[4]
BLOCK = 1024
NUM_ROWS = 3

needs_compiler = pytest.mark.skipif(
    shutil.which("cc") is None and shutil.which("gcc") is None, reason="there is no C compiler"
)
needs_avx2 = pytest.mark.skipif(
    "avx2" not in Path("/proc/cpuinfo").read_text().split(), reason="this processor has no AVX2"
)


@pytest.fixture
def code() -> CopyRows:
    """Where it can be had."""
    found = compiled()
    if found is None:
        pytest.skip("there is no compiled code here")
    return found


def place(rows: Rows) -> Place:
    """Of a whole array."""
    return Place(rows.ctypes.data, *rows.shape)


@needs_compiler
@needs_avx2
def test_it_is_there_where_it_can_be() -> None:
    """An installation that has lost it without a word would be found out here, and not by its speed."""
    assert compiled() is not None


@st.composite
def two_sides(draw: st.DrawFn) -> tuple[Pieces, Pieces, int]:
    """The same bytes in pieces that lie anywhere in a row of the source, and otherwise in one of the target."""
    last = draw(st.one_of(st.integers(64, 300), st.integers(BLOCK - 2, 3 * BLOCK)))
    blocks = draw(st.lists(st.integers(1, 3), max_size=4))
    if not blocks:
        last = max(last, 241)
    total = sum(blocks) * BLOCK + last

    def side() -> list[tuple[int, int]]:
        cuts = sorted(draw(st.sets(st.integers(1, sum(blocks)), max_size=3))) if blocks else []
        ends = [cut * BLOCK for cut in cuts if cut * BLOCK <= total - 64] + [total]
        lengths = np.diff([0, *ends]).tolist()
        at, offsets = draw(st.integers(0, 70)), {}
        for index in draw(st.permutations(range(len(lengths)))):
            offsets[index] = at
            at += lengths[index] + draw(st.sampled_from([0, 1, 31, 32, 64]))
        return [(offsets[index], length) for index, length in enumerate(lengths)]

    source, target = (np.array(side(), dtype=np.int64) for _ in range(2))
    return source, target, total


def taken(rows: Rows, pieces: Pieces) -> Rows:
    """What the pieces of each row are, in order."""
    return np.concatenate([rows[:, at : at + length] for at, length in pieces], axis=1)


@given(two_sides(), st.booleans(), st.booleans())
def test_copies_and_digests_are_those_of_numpy_and_xxhash(
    sides: tuple[Pieces, Pieces, int], store_past: bool, load_past: bool
) -> None:
    """Wherever pieces lie, aligned or not; what lies between them in the target stays as it was."""
    code = compiled()
    if code is None:
        pytest.skip("there is no compiled code here")
    source_pieces, target_pieces, total = sides
    width = 80 + total + 64 * 8
    rng = np.random.default_rng(total)
    source, target = (rng.integers(0, 256, (NUM_ROWS, width), dtype=np.uint8) for _ in range(2))
    content, before = taken(source, source_pieces), target.copy()
    moves = moves_between(source_pieces, target_pieces)
    assert moves is not None
    wanted = [xxh3_64_intdigest(row.tobytes()) for row in content]
    assert wanted == code(place(source), None, NUM_ROWS, moves, load_past=load_past)
    assert np.array_equal(before, target)
    assert wanted == code(
        place(source), place(target), NUM_ROWS, moves, store_past=store_past, load_past=load_past
    )
    assert np.array_equal(content, taken(target, target_pieces))
    for at, length in target_pieces:
        before[:, at : at + length] = target[:, at : at + length]
    assert np.array_equal(before, target)


@pytest.mark.parametrize("num_bytes", [241, 304, BLOCK, BLOCK + 1, BLOCK + 63, 2 * BLOCK, 70_001])
def test_a_row_in_one_piece(code: CopyRows, num_bytes: int) -> None:
    """Of any length from the least one on."""
    source = np.random.default_rng(num_bytes).integers(0, 256, (NUM_ROWS, num_bytes + 9), dtype=np.uint8)
    target = np.zeros((NUM_ROWS, num_bytes + 3), dtype=np.uint8)
    moves = moves_between([(5, num_bytes)], [(2, num_bytes)])
    assert moves is not None
    digests = code(place(source), place(target), NUM_ROWS, moves, store_past=True)
    content = source[:, 5 : 5 + num_bytes]
    assert np.array_equal(content, target[:, 2:-1])
    assert [xxh3_64_intdigest(row.tobytes()) for row in content] == digests
    assert not target[:, :2].any()
    assert not target[:, -1:].any()


@pytest.mark.parametrize(
    ("source", "target"),
    [
        ([240], [240]),  # another way to digest so few bytes
        ([BLOCK + 1, 300], [BLOCK + 301]),  # a piece that is not whole blocks
        ([BLOCK, 63], [BLOCK + 63]),  # the last stripe would begin in the piece before
        ([BLOCK, 2 * BLOCK], [BLOCK + 512, BLOCK + 512]),  # whole blocks here, but not where both are cut
    ],
)
def test_other_pieces_take_two_passes(source: list[int], target: list[int]) -> None:
    """They are refused before anything is copied."""
    sides = [np.array([(0, length) for length in lengths], dtype=np.int64) for lengths in (source, target)]
    assert moves_between(*sides) is None


def test_one_piece_that_is_too_short_takes_two_passes() -> None:
    """As above."""
    assert moves_between([(0, 240)], [(0, 240)]) is None


@pytest.mark.parametrize(("source", "target"), [((0, 300), (0, 301)), ((-1, 300), (0, 300))])
def test_one_piece_that_does_not_fit_is_no_move(source: tuple[int, int], target: tuple[int, int]) -> None:
    """It would be a bug of ours, and another's memory."""
    with pytest.raises(InvariantBroken):
        moves_between([source], [target])


@pytest.mark.parametrize("at", [(0, 0), (1, 0), (0, 1)])
def test_memory_beyond_the_rows_is_never_touched(code: CopyRows, at: tuple[int, int]) -> None:
    """Neither beyond a row's end nor after the last row, on neither side."""
    memory = np.zeros((2, NUM_ROWS, 300), dtype=np.uint8)
    source, target = (place(rows) for rows in memory)
    fewer = source._replace(num_rows=NUM_ROWS - 1), target._replace(num_rows=NUM_ROWS - 1)
    moves = moves_between([(at[0], 300)], [(at[1], 300)])
    assert moves is not None
    with nullcontext() if at == (0, 0) else pytest.raises(InvariantBroken):
        code(source, target, NUM_ROWS, moves)
    with nullcontext() if at[0] == 0 else pytest.raises(InvariantBroken):
        code(source, None, NUM_ROWS, moves)
    for one, other in ((source, fewer[1]), (fewer[0], target), (fewer[0], None)):
        with pytest.raises(InvariantBroken):
            code(one, other, NUM_ROWS, moves)


@pytest.mark.parametrize("source", [[(0, 2048)], [(0, 1024), (1024, 1024)]])
def test_two_sides_have_equally_many_bytes(source: list[tuple[int, int]]) -> None:
    """Else the longer one would be another's memory on the other side."""
    with pytest.raises(InvariantBroken):
        moves_between(source, [(0, 2049)])


@pytest.mark.parametrize("origin", [None, "/nowhere/_copy_rows.so", "libc"])
def test_what_does_not_fit_is_not_used(monkeypatch: pytest.MonkeyPatch, origin: str | None) -> None:
    """No library, a broken path, or a library of other functions."""
    if origin == "libc":
        origin = next(
            line.split()[-1] for line in Path("/proc/self/maps").read_text().splitlines() if "libc.so" in line
        )
    spec = ModuleSpec("shared.kv._copy_rows", None, origin=origin)
    monkeypatch.setattr(copy_rows, "find_spec", lambda _: spec)
    assert compiled.__wrapped__() is None


@pytest.mark.parametrize("broken", [{"store_past": True}, {"store_past": False}, {"load_past": True}, {}])
def test_code_of_which_one_loop_is_wrong_is_not_used(code: CopyRows, broken: dict[str, bool]) -> None:
    """Digests are of what is read: that nothing, or too little, was stored they would not tell."""

    class Broken(CopyRows):
        def __init__(self) -> None: ...

        def __call__(
            self, source: Place, target: Place | None, num_rows: int, moves: Moves, **how: bool
        ) -> list[int]:
            is_broken = bool(broken) and all(how.get(name) == value for name, value in broken.items())
            return code(source, None if is_broken else target, num_rows, moves, **how)

    assert copy_rows._is_right(Broken()) == (not broken)


@pytest.mark.slow
@pytest.mark.parametrize("compiler", [None, "/bin/false"])
@needs_compiler
def test_an_installation_needs_no_compiler(tmp_path: Path, compiler: str | None) -> None:
    """It goes on without the compiled code; with one the wheel has it."""
    project = tmp_path / "project"
    project.mkdir()
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, project)
    for name in ("shared", "services", "router", "loadtest"):
        shutil.copytree(ROOT / name, project / name, ignore=shutil.ignore_patterns("*.so", "__pycache__"))
    environ = dict(os.environ) | ({"CC": compiler} if compiler else {})
    command = [sys.executable, "-m", "pip", "wheel", "--no-deps", "--no-build-isolation", "--no-index"]
    command += ["--disable-pip-version-check", "--wheel-dir", str(tmp_path), str(project)]
    subprocess.run(command, check=True, capture_output=True, env=environ)
    (wheel,) = tmp_path.glob("*.whl")
    names = zipfile.ZipFile(wheel).namelist()
    assert "shared/kv/copy_rows.py" in names
    assert (compiler is None) == any(name.startswith("shared/kv/_copy_rows.") for name in names)

"""Rows copied and digested in one pass, by code of this project that is compiled when it is installed.

Where there is no compiler, or no AVX2, `compiled` finds nothing, and `shared.kv.pieces` copies with numpy and
digests afterwards, with xxhash: the same bytes, the same digests, two passes.
"""

from __future__ import annotations

import ctypes
import mmap
from array import array
from collections.abc import Callable, Sequence
from functools import cache
from importlib.util import find_spec
from itertools import product
from typing import Any, NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

from shared.errors import InvariantBroken

# (offset in a row, bytes) of each piece, in order: pairs, or int64 [n, 2] where there are many.
Pieces = Sequence[tuple[int, int]] | np.ndarray[Any, np.dtype[np.int64]]

_INTERFACE = 1  # of copy_rows.c
_LIBRARY = "shared.kv._copy_rows"
# What copy_rows.c wants of pieces.
_BLOCK_BYTES = 1024
_LEAST_LAST = 64
_LEAST_ROW = 241
_TEST_ROWS = 2


class Place(NamedTuple):
    """Rows in memory, one right after the other, from an address on. Its owner keeps them alive."""

    address: int
    num_rows: int
    row_bytes: int


class Moves:
    """The pieces that each row is copied in: int64 [n, 3], where from and where to in a row, and bytes.

    source_end, target_end: where the last of them ends there.
    """

    def __init__(self, pieces: array[int], source_end: int, target_end: int) -> None:
        self._pieces = pieces
        self.address, num_words = pieces.buffer_info()
        self.num_pieces = num_words // 3
        self.source_end = source_end
        self.target_end = target_end


def moves_between(source: Pieces, target: Pieces) -> Moves | None:
    """How to copy the pieces of one side to those of the other; None if not in one pass.

    Both sides have equally many bytes in all, and no empty piece. Raises InvariantBroken.
    """
    if len(source) == len(target) == 1:
        # As nearly always. Cold, numpy takes a third of a millisecond for what is below.
        (begin, num_bytes), (to, to_bytes) = source[0], target[0]
        if num_bytes != to_bytes or min(begin, to) < 0:
            raise InvariantBroken(f"{num_bytes} bytes from {begin} on do not go to {to_bytes} from {to} on")
        if num_bytes < _LEAST_ROW:
            return None
        return Moves(array("q", (begin, to, num_bytes)), begin + num_bytes, to + num_bytes)
    sides = [np.asarray(side, dtype=np.int64) for side in (source, target)]
    ends, to_ends = (side[:, 1].cumsum() for side in sides)
    if ends[-1] != to_ends[-1] or min(side.min() for side in sides) < 0:
        raise InvariantBroken(f"{ends[-1]} bytes do not go to {to_ends[-1]}")
    cuts = np.union1d(ends, to_ends)
    begins = np.concatenate(([0], cuts[:-1]))
    nbytes = cuts - begins
    if cuts[-1] < _LEAST_ROW or nbytes[-1] < _LEAST_LAST or (nbytes[:-1] % _BLOCK_BYTES).any():
        return None
    offsets = [
        side[at, 0] + begins - (its_ends[at] - side[at, 1])
        for side, its_ends in zip(sides, (ends, to_ends), strict=True)
        for at in (np.searchsorted(its_ends, begins, side="right"),)
    ]
    pieces = np.stack([*offsets, nbytes], axis=1).astype(np.int64)
    return Moves(array("q", pieces.tobytes()), *(int((begin + nbytes).max()) for begin in offsets))


class CopyRows:
    """The compiled code."""

    def __init__(self, library: ctypes.CDLL) -> None:
        self._copy: Callable[..., None] = library.handoff_copy_rows
        address, size, stride = ctypes.c_void_p, ctypes.c_size_t, ctypes.c_ssize_t
        flag = ctypes.c_int
        library.handoff_copy_rows.restype = None
        library.handoff_copy_rows.argtypes = [
            address, stride, address, stride, size, address, size, flag, flag, address,
        ]  # fmt: skip

    def __call__(
        self,
        source: Place,
        target: Place | None,
        num_rows: int,
        moves: Moves,
        *,
        store_past: bool = False,
        load_past: bool = False,
    ) -> list[int]:
        """Copy; the digest of each row. Without the interpreter's lock.

        Without a target rows are only digested. store_past, load_past: past the caches; else through them.
        Raises InvariantBroken, and touches nothing then, if the pieces are not within the rows.
        """
        address, most_rows, row_bytes = source
        to, most_to, to_bytes = target or (None, num_rows, moves.target_end)
        if num_rows > min(most_rows, most_to) or moves.source_end > row_bytes or moves.target_end > to_bytes:
            ends = f"{moves.source_end} and {moves.target_end}"
            raise InvariantBroken(
                f"{num_rows} rows of {ends} bytes are not within {source[1:]} and {to_bytes}"
            )
        digests = array("Q", bytes(8 * num_rows))
        self._copy(
            address,
            row_bytes,
            to,
            to_bytes,
            num_rows,
            moves.address,
            moves.num_pieces,
            store_past,
            load_past,
            digests.buffer_info()[0],
        )
        return digests.tolist()


@cache
def compiled() -> CopyRows | None:
    """The compiled code, if it is there, fits, and digests as xxhash does."""
    found = find_spec(_LIBRARY)
    if found is None or found.origin is None:
        return None
    try:
        library = ctypes.CDLL(found.origin)
        if library.handoff_interface() != _INTERFACE or not library.handoff_is_supported():
            return None
    except (OSError, AttributeError):
        return None
    copy_rows = CopyRows(library)
    return copy_rows if _is_right(copy_rows) else None


def _is_right(copy_rows: CopyRows) -> bool:
    """Each of its loops, with two rows in two pieces each, the last one of no round length."""
    num_bytes, first, width = 2 * _BLOCK_BYTES + _LEAST_LAST + 1, _BLOCK_BYTES, 4 * _BLOCK_BYTES
    # Stores that go past the caches need aligned memory, as KV pools are.
    memory = np.frombuffer(mmap.mmap(-1, 2 * _TEST_ROWS * width), dtype=np.uint8).reshape(
        2, _TEST_ROWS, width
    )
    source, target = memory
    source[:] = np.random.default_rng(0).integers(0, 256, source.shape, dtype=np.uint8)
    turned = [(2 * _BLOCK_BYTES, first), (0, num_bytes - first)]
    moves = moves_between([(0, num_bytes)], turned)
    assert moves is not None
    origin, end = (Place(rows.ctypes.data, _TEST_ROWS, width) for rows in (source, target))
    content = source[:, :num_bytes]
    wanted = [xxh3_64_intdigest(row) for row in content]
    for store_past, load_past in product((False, True), repeat=2):
        target[:] = 0
        how = {"store_past": store_past, "load_past": load_past}
        if wanted != copy_rows(origin, end, _TEST_ROWS, moves, **how):
            return False
        pieces = [target[:, at : at + length] for at, length in turned]
        if not np.array_equal(content, np.concatenate(pieces, axis=1)):
            return False
        if wanted != copy_rows(origin, None, _TEST_ROWS, moves, load_past=load_past):
            return False
    return True

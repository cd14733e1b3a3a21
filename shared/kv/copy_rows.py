"""Rows copied and digested in one pass, by code of this project that is compiled when it is installed.

Where there is no compiler, or no AVX2, `compiled` finds nothing, and `shared.kv.pieces` copies with numpy and
digests afterwards, with xxhash: the same bytes, the same digests, two passes.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Callable
from functools import cache
from importlib.util import find_spec
from typing import Any, NamedTuple

import numpy as np
from xxhash import xxh3_64_intdigest

Pieces = np.ndarray[Any, np.dtype[np.int64]]

_INTERFACE = 1  # of copy_rows.c
_LIBRARY = "shared.kv._copy_rows"
# What copy_rows.c wants of pieces.
_BLOCK_BYTES = 1024
_LEAST_LAST = 64
_LEAST_ROW = 241
_TEST_ROWS = 2


class Place(NamedTuple):
    """Rows in memory: the address of the first one, and from each to the next one. Its owner keeps them alive."""

    address: int
    stride: int


class Moves:
    """The pieces that each row is copied in: int64 [n, 3], where from and where to in a row, and bytes."""

    def __init__(self, pieces: array[int]) -> None:
        self._pieces = pieces
        self.address, num_words = pieces.buffer_info()
        self.num_pieces = num_words // 3


def move(source: tuple[int, int], target_offset: int) -> Moves | None:
    """How to copy one piece (offset, bytes) to another; None if not in one pass."""
    offset, num_bytes = source
    return Moves(array("q", (offset, target_offset, num_bytes))) if num_bytes >= _LEAST_ROW else None


def moves_between(source: Pieces, target: Pieces) -> Moves | None:
    """How to copy pieces, int64 [n, 2] (offset, bytes), of one side to those of the other; None if not in one pass.

    Both sides have equally many bytes in all, and no empty piece.
    """
    ends, to_ends = source[:, 1].cumsum(), target[:, 1].cumsum()
    cuts = np.union1d(ends, to_ends)
    begins = np.concatenate(([0], cuts[:-1]))
    nbytes = cuts - begins
    if cuts[-1] < _LEAST_ROW or nbytes[-1] < _LEAST_LAST or (nbytes[:-1] % _BLOCK_BYTES).any():
        return None
    offsets = [
        side[at, 0] + begins - (its_ends[at] - side[at, 1])
        for side, its_ends in ((source, ends), (target, to_ends))
        for at in (np.searchsorted(its_ends, begins, side="right"),)
    ]
    return Moves(array("q", np.stack([*offsets, nbytes], axis=1).astype(np.int64).tobytes()))


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
        """Copy; the digest of each row. Without the interpreter's lock. Believes what it is told of memory.

        Without a target rows are only digested. store_past, load_past: past the caches; else through them.
        """
        digests = array("Q", bytes(8 * num_rows))
        to = target or Place(0, 0)
        self._copy(
            source.address,
            source.stride,
            to.address,
            to.stride,
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
    """Two rows in two pieces each, the last one of no round length."""
    num_bytes, first = 2 * _BLOCK_BYTES + _LEAST_LAST + 1, _BLOCK_BYTES
    source = np.random.default_rng(0).integers(0, 256, (_TEST_ROWS, num_bytes), dtype=np.uint8)
    target = np.zeros_like(source)
    whole = np.array([(0, num_bytes)], dtype=np.int64)
    turned = np.array([(num_bytes - first, first), (0, num_bytes - first)], dtype=np.int64)
    moves = moves_between(whole, turned)
    assert moves is not None
    origin, end = (Place(rows.ctypes.data, num_bytes) for rows in (source, target))
    digests = copy_rows(origin, end, _TEST_ROWS, moves)
    back = np.roll(target, first, axis=1)
    return bool((back == source).all()) and digests == [xxh3_64_intdigest(row) for row in source]

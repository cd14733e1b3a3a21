"""What ends a blob: first tokens, whether they ended their choices, and the digest of everything before.

    i64 for each choice | u8 for each choice | u64 for each tensor in file order, these two included, and the header

Both sides make it ready as soon as the digests of K and V are known, while they wait for the first tokens.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence

from xxhash import xxh3_64_intdigest

from shared.errors import DigestMismatch, InvariantBroken, ManifestMismatch
from shared.kv.layout import BlobLayout
from shared.kv.progress import FirstTokens

_MAX_TOKEN_ID = 2**31


class Trailer:
    """digests: of K and V, in file order. header: its bytes as they travel; not always as we would write them."""

    def __init__(self, layout: BlobLayout, digests: Sequence[int], header: bytes) -> None:
        self._layout = layout
        self._choices = layout.manifest.num_choices
        self._kv_digests = struct.pack(f"<{len(digests)}Q", *digests)
        self._header_digest = xxh3_64_intdigest(header)

    def of(self, first: FirstTokens) -> bytes:
        """The bytes for these tokens. Raises InvariantBroken."""
        if len(first.token_ids) != self._choices or len(first.finished) != self._choices:
            raise InvariantBroken(f"{len(first.token_ids)} first tokens for {self._choices} choices")
        return self._with_digests(struct.pack(f"<{self._choices}q", *first.token_ids), bytes(first.finished))

    def read(self, content: bytes | bytearray) -> FirstTokens:
        """Raises DigestMismatch unless every digest is right, ManifestMismatch for what are no tokens or flags."""
        choices = self._choices
        tokens, flags = content[: 8 * choices], content[8 * choices : 9 * choices]
        wanted = self._with_digests(tokens, flags)
        if content != wanted:
            raise DigestMismatch(
                f"{self._damaged(content, wanted)} was damaged on the way, or its digest was"
            )
        token_ids = struct.unpack(f"<{choices}q", tokens)
        if not all(0 <= token < _MAX_TOKEN_ID for token in token_ids) or not set(flags) <= {0, 1}:
            raise ManifestMismatch("the first tokens are no token ids, or their flags no flags")
        return FirstTokens(token_ids, tuple(flag == 1 for flag in flags))

    def _with_digests(self, tokens: bytes | bytearray, flags: bytes | bytearray) -> bytes:
        own = struct.pack("<3Q", xxh3_64_intdigest(tokens), xxh3_64_intdigest(flags), self._header_digest)
        return b"".join((tokens, flags, self._kv_digests, own))

    def _damaged(self, content: bytes | bytearray, wanted: bytes) -> str:
        """The first thing whose digest is not as claimed."""
        names = ["the header" if span.name == "digests" else span.name for span in self._layout.spans()]
        form = f"<{len(names)}Q"
        claimed, computed = (struct.unpack(form, side[9 * self._choices :]) for side in (content, wanted))
        return next(name for name, a, b in zip(names, claimed, computed, strict=True) if a != b)

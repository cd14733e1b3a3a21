"""What the two sides of the NIXL transport say to each other beside what every PUT says.

    X-Handoff-Nixl: <block size>/<introduction bytes>/<token>
    PUT body: header | introduction | blocks | lengths (both `shared.kv.told_chunk`) | trailer

The introduction comes with the first PUT of a connection: the library's metadata of the prefill worker, where its
pool has the K and V of each layer, and an HMAC of both: a flipped bit in metadata ends the process that gives it to
the library. A notice goes from decode to prefill through the library: how much was read.
"""

from __future__ import annotations

import hmac
import re
import struct
from dataclasses import dataclass

from shared.errors import InvalidRequest, TransportFailed
from shared.kv import told_chunk
from shared.kv.layout import BlobLayout
from shared.kv.mac import MAC_BYTES, mac

NAME = "nixl"
HEADER = "X-Handoff-Nixl"
TOKEN_BYTES = 8
MAX_INTRODUCTION_BYTES = 1024 * 1024

_MAX_BLOCK_SIZE = 1 << 20
_FIELDS = re.compile(rf"([1-9][0-9]{{0,6}})/(0|[1-9][0-9]{{0,6}})/([0-9a-f]{{{2 * TOKEN_BYTES}}})")
_SIZES = struct.Struct("<II")
_DOMAIN = b"handoff nixl introduction 1\0"
_NOTICE = struct.Struct(f"<{TOKEN_BYTES}sQ")


@dataclass(frozen=True, slots=True)
class Terms:
    """The head's field. block_size: of prefill's pool. token: stands for the connection in notices."""

    block_size: int
    introduction_bytes: int
    token: bytes

    def __str__(self) -> str:
        return f"{self.block_size}/{self.introduction_bytes}/{self.token.hex()}"

    @classmethod
    def parse(cls, text: str) -> Terms:
        """Read what `str` wrote. Raises InvalidRequest."""
        match = _FIELDS.fullmatch(text)
        if match is None or int(match[1]) > _MAX_BLOCK_SIZE or int(match[2]) > MAX_INTRODUCTION_BYTES:
            raise InvalidRequest(f"{HEADER} cannot be read")
        return cls(int(match[1]), int(match[2]), bytes.fromhex(match[3]))

    def body_bytes(self, header_bytes: int, layout: BlobLayout) -> int:
        """Length of the PUT's body."""
        chunks_bytes = told_chunk.body_bytes(layout, self.block_size)
        return header_bytes + self.introduction_bytes + chunks_bytes + layout.trailer_bytes


@dataclass(frozen=True, slots=True)
class Introduction:
    """metadata: the library's. bases: addresses of K, then V, layer by layer."""

    metadata: bytes
    bases: tuple[int, ...]

    def pack(self, secret: bytes) -> bytes:
        """As it travels."""
        sizes = _SIZES.pack(len(self.metadata), len(self.bases))
        content = sizes + self.metadata + struct.pack(f"<{len(self.bases)}Q", *self.bases)
        return content + mac(secret, _DOMAIN, content)

    @classmethod
    def unpack(cls, whole: bytes | bytearray, secret: bytes) -> Introduction:
        """Read what `pack` wrote. Raises TransportFailed, InvalidRequest."""
        content, signed = whole[:-MAC_BYTES], whole[-MAC_BYTES:]
        if not hmac.compare_digest(signed, mac(secret, _DOMAIN, content)):
            raise TransportFailed("the NIXL introduction was damaged on the way, or signed by somebody else")
        try:
            metadata_bytes, num_bases = _SIZES.unpack_from(content)
            metadata, *bases = struct.unpack(f"<{metadata_bytes}s{num_bases}Q", content[_SIZES.size :])
        except struct.error as exc:
            raise InvalidRequest("the NIXL introduction cannot be read") from exc
        return cls(metadata, tuple(bases))


def pack_notice(token: bytes, read_bytes: int) -> bytes:
    """read_bytes: of all PUTs of the connection so far."""
    return _NOTICE.pack(token, read_bytes)


def unpack_notice(content: bytes) -> tuple[bytes, int] | None:
    """Token and bytes; None for what is no notice of ours."""
    if len(content) != _NOTICE.size:
        return None
    token, read_bytes = _NOTICE.unpack(content)
    return token, read_bytes

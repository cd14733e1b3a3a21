"""The manifest: what a blob of KV claims to be, and whether that is what was reserved.

It travels as the `__metadata__` of the safetensors header (string to string). Every field of it is checked
before a byte of KV is written. The chunk list alone is the sender's choice: any that tiles the range will do.
"""

from __future__ import annotations

import hashlib
import re
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields, replace

from shared.errors import ManifestMismatch
from shared.kv.shape import ITEMSIZE_BYTES, WIRE_FORMATS, KvDtype, KvShape, WireFormat
from shared.wire import PROTOCOL_VERSION

MAX_CHUNKS = 1024
MAX_CHOICES = 128
MAX_PLANNED_TENSORS = 8192  # of a blob: header, and memory for it, grow with them
QUANTISED_PARTS = 3  # of a tensor: codes, scales and offsets
MAX_QUANTISED_TENSORS = 65536  # of a blob that is long for that: some 6 MB of header
MAX_QUANTISED_TOKENS = 1024  # of a chunk: a whole tensor of it goes through one buffer

Chunk = tuple[int, int]

_INTEGER = re.compile(r"(?:0|[1-9][0-9]{0,14})")
_NAME = re.compile(r"[A-Za-z0-9._-]{1,128}")
_DTYPES: dict[str, KvDtype] = {name: name for name in ITEMSIZE_BYTES}
_WIRE_FORMATS: dict[str, WireFormat] = {name: name for name in WIRE_FORMATS}


@dataclass(frozen=True, slots=True)
class Expected:
    """What a reservation will accept. num_tokens is the whole prompt; KV covers [from_token, num_tokens).

    kv_wire: quantised KV that is accepted as well as exact KV. In a manifest: how its KV is quantised, if it is.
    """

    fingerprint: str
    handoff_id: str
    epoch: int
    token_hash: str
    from_token: int
    num_tokens: int
    num_choices: int
    shape: KvShape
    kv_wire: WireFormat | None = field(default=None, kw_only=True)


@dataclass(frozen=True, slots=True)
class Manifest(Expected):
    """The identity of one blob. fingerprint: `Fingerprint.digest` of the sender's model.

    chunks: half-open (start, end) token positions that tile [from_token, num_tokens) in order; maybe none.
    Raises ValueError if it could not be a blob at all.
    """

    chunks: tuple[Chunk, ...]
    protocol: int = PROTOCOL_VERSION

    def __post_init__(self) -> None:
        if not 0 <= self.from_token <= self.num_tokens or self.num_tokens < 1:
            raise ValueError("from_token must lie in [0, num_tokens] and num_tokens be positive")
        if not 1 <= self.num_choices <= MAX_CHOICES:
            raise ValueError(f"num_choices must lie in [1, {MAX_CHOICES}]")
        if len(self.chunks) > MAX_CHUNKS:
            raise ValueError(f"more than {MAX_CHUNKS} chunks")
        position = self.from_token
        for start, end in self.chunks:
            if start != position or end <= start:
                raise ValueError("chunks must tile [from_token, num_tokens) in order")
            position = end
        if position != self.num_tokens:
            raise ValueError("chunks must tile [from_token, num_tokens) in order")
        if self.kv_wire is not None and any(end - start > MAX_QUANTISED_TOKENS for start, end in self.chunks):
            raise ValueError(f"a chunk of quantised KV has more than {MAX_QUANTISED_TOKENS} tokens")

    def quantised(self, kv_wire: WireFormat) -> Manifest:
        """The same KV quantised, in chunks short enough for that, and as long as that allows if they are many.

        As it is, if there would be too many even so.
        """
        own_tensors = QUANTISED_PARTS * self.shape.num_tensors
        chunks = tuple(part for start, end in self.chunks for part in _cut(start, end, MAX_QUANTISED_TOKENS))
        if len(chunks) * own_tensors > MAX_PLANNED_TENSORS:
            chunks = _cut(self.from_token, self.num_tokens, MAX_QUANTISED_TOKENS)
        if len(chunks) > min(MAX_CHUNKS, MAX_QUANTISED_TENSORS // own_tensors):
            return self
        return replace(self, chunks=chunks, kv_wire=kv_wire)

    @classmethod
    def of(cls, expected: Expected, chunks: str, *, quantised: bool) -> Manifest:
        """The one that a reservation accepts, if its KV comes in these chunks, written as in the metadata.

        Raises ValueError.
        """
        return cls(
            fingerprint=expected.fingerprint,
            handoff_id=expected.handoff_id,
            epoch=expected.epoch,
            token_hash=expected.token_hash,
            from_token=expected.from_token,
            num_tokens=expected.num_tokens,
            num_choices=expected.num_choices,
            shape=expected.shape,
            chunks=_chunks(chunks),
            kv_wire=expected.kv_wire if quantised else None,
        )

    @property
    def kv_bytes(self) -> int:
        """Tensor bytes of K and V, as they are in the pool."""
        return (self.num_tokens - self.from_token) * self.shape.bytes_per_token

    def to_metadata(self) -> dict[str, str]:
        """Flat strings, as a safetensors header wants them."""
        quantised = {} if self.kv_wire is None else {"kv_wire": self.kv_wire}
        return quantised | {
            "protocol": str(self.protocol),
            "fingerprint": self.fingerprint,
            "handoff_id": self.handoff_id,
            "epoch": str(self.epoch),
            "token_hash": self.token_hash,
            "from_token": str(self.from_token),
            "num_tokens": str(self.num_tokens),
            "chunks": ",".join(f"{start}-{end}" for start, end in self.chunks),
            "num_choices": str(self.num_choices),
            "num_layers": str(self.shape.num_layers),
            "num_kv_heads": str(self.shape.num_kv_heads),
            "head_dim": str(self.shape.head_dim),
            "dtype": self.shape.dtype,
        }

    @classmethod
    def from_metadata(cls, metadata: Mapping[str, object]) -> Manifest:
        """Read what `to_metadata` wrote; raises ManifestMismatch for anything else."""
        if metadata.get("protocol") != str(PROTOCOL_VERSION):
            raise ManifestMismatch(f"the manifest's protocol is not {PROTOCOL_VERSION}")
        taken = _Fields(metadata)
        try:
            shape = KvShape(
                num_layers=taken.integer("num_layers"),
                num_kv_heads=taken.integer("num_kv_heads"),
                head_dim=taken.integer("head_dim"),
                dtype=taken.dtype("dtype"),
            )
            manifest = cls(
                fingerprint=taken.name("fingerprint"),
                handoff_id=taken.name("handoff_id"),
                epoch=taken.integer("epoch"),
                token_hash=taken.name("token_hash"),
                from_token=taken.integer("from_token"),
                num_tokens=taken.integer("num_tokens"),
                num_choices=taken.integer("num_choices"),
                shape=shape,
                chunks=taken.chunks("chunks"),
                protocol=taken.integer("protocol"),
                kv_wire=taken.wire_format("kv_wire"),
            )
        except ValueError as exc:
            raise ManifestMismatch(f"the manifest cannot be read: {exc}") from exc
        if taken.left:
            raise ManifestMismatch("the manifest has a field that this protocol does not know")
        return manifest


class _Fields:
    """Strict reader of metadata strings: raises ValueError naming the field."""

    def __init__(self, metadata: Mapping[str, object]) -> None:
        self.left = dict(metadata)

    def _text(self, name: str) -> str:
        value = self.left.pop(name, None)
        if not isinstance(value, str):
            raise ValueError(f"{name} is missing or no string")
        return value

    def integer(self, name: str) -> int:
        return _integer(self._text(name), name)

    def name(self, name: str) -> str:
        text = self._text(name)
        if not _NAME.fullmatch(text):
            raise ValueError(f"{name} is not a plain name")
        return text

    def dtype(self, name: str) -> KvDtype:
        text = self._text(name)
        if text not in _DTYPES:
            raise ValueError(f"{name} is none of {', '.join(_DTYPES)}")
        return _DTYPES[text]

    def wire_format(self, name: str) -> WireFormat | None:
        """None if it is missing."""
        if name not in self.left:
            return None
        text = self._text(name)
        if text not in _WIRE_FORMATS:
            raise ValueError(f"{name} is none of {', '.join(_WIRE_FORMATS)}")
        return _WIRE_FORMATS[text]

    def chunks(self, name: str) -> tuple[Chunk, ...]:
        return _chunks(self._text(name))


def _chunks(text: str) -> tuple[Chunk, ...]:
    parts = text.split(",", MAX_CHUNKS) if text else []
    if len(parts) > MAX_CHUNKS:
        raise ValueError(f"more than {MAX_CHUNKS} chunks")
    chunks = []
    for part in parts:
        start, _, end = part.partition("-")
        chunks.append((_integer(start, "chunks"), _integer(end, "chunks")))
    return tuple(chunks)


def _integer(text: str, name: str) -> int:
    if not _INTEGER.fullmatch(text):
        raise ValueError(f"{name} is no plain decimal integer")
    return int(text)


def check(received: Manifest, expected: Expected) -> None:
    """Raise ManifestMismatch, naming every field that is not as reserved."""
    names = [f.name for f in fields(Expected) if f.name != "kv_wire"]
    differing = [name for name in names if getattr(received, name) != getattr(expected, name)]
    if received.kv_wire not in (None, expected.kv_wire):
        differing.append("kv_wire")
    if differing:
        raise ManifestMismatch(f"the KV is not what was reserved: {', '.join(differing)}")


def token_hash(token_ids: Sequence[int]) -> str:
    """32 hex digits that stand for the token ids and their order. Each id is in [0, 2**32)."""
    content = struct.pack(f"<{len(token_ids)}I", *token_ids)
    return hashlib.blake2b(content, digest_size=16).hexdigest()


def plan_chunks(from_token: int, num_tokens: int, chunk_size: int, shape: KvShape) -> tuple[Chunk, ...]:
    """Cut [from_token, num_tokens) into chunks of `chunk_size` (0: one chunk) from its start.

    A prompt so long that there would be more than MAX_CHUNKS, or more than MAX_PLANNED_TENSORS in them, gets chunks
    of a multiple of `chunk_size`.
    """
    length = num_tokens - from_token
    if length <= 0:
        return ()
    most = max(1, min(MAX_CHUNKS, MAX_PLANNED_TENSORS // shape.num_tensors))
    size = chunk_size or length
    return _cut(from_token, num_tokens, size * -(-length // (size * most)))


def _cut(start: int, end: int, size: int) -> tuple[Chunk, ...]:
    return tuple((at, min(at + size, end)) for at in range(start, end, size))

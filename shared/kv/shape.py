"""What one token's KV weighs: the shape that both sides must share. No tensor library here."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal, get_args

KvDtype = Literal["F32", "BF16", "F16"]
Kind = Literal["k", "v"]
KINDS: tuple[Kind, ...] = get_args(Kind)
WireFormat = Literal["int8", "fp8"]
WIRE_FORMATS: tuple[WireFormat, ...] = get_args(WireFormat)
KV_DTYPES: dict[str, KvDtype] = {"float32": "F32", "bfloat16": "BF16", "float16": "F16"}
ITEMSIZE_BYTES: dict[KvDtype, int] = {"F32": 4, "BF16": 2, "F16": 2}


def tensor_index(layer: int, kind: Kind) -> int:
    """Which of a chunk's tensors, and of a pool's regions: each layer's K, then its V, layer by layer."""
    return layer * len(KINDS) + KINDS.index(kind)


@dataclass(frozen=True, slots=True)
class KvShape:
    """L layers of K and V, each [tokens, K, D]. dtype uses the names of safetensors."""

    num_layers: int
    num_kv_heads: int
    head_dim: int
    dtype: KvDtype

    def __post_init__(self) -> None:
        """Raise ValueError for what cannot be a model.

        head_dim is even (rotary embedding needs it); so all of KV together is a multiple of 8 bytes.
        """
        if self.dtype not in ITEMSIZE_BYTES:
            raise ValueError(f"dtype {self.dtype!r} is none of {', '.join(ITEMSIZE_BYTES)}")
        if min(self.num_layers, self.num_kv_heads, self.head_dim) < 1 or self.head_dim % 2:
            raise ValueError("num_layers, num_kv_heads and head_dim must be positive and head_dim even")

    @property
    def row_bytes(self) -> int:
        """One token, one layer, K or V alone."""
        return self.num_kv_heads * self.head_dim * ITEMSIZE_BYTES[self.dtype]

    @property
    def num_tensors(self) -> int:
        """A chunk's tensors, and a pool's regions: K and V of each layer."""
        return self.num_layers * len(KINDS)

    @property
    def bytes_per_token(self) -> int:
        """One token, all layers, K and V."""
        return self.num_tensors * self.row_bytes

"""Attention over the block pool, plugged into transformers' public attention interface.

The model hands each layer's rotated q, k, v of the packed tokens of a step to `block_attention`. It writes K
and V into the pool, then attends per sequence through its block table. The model itself is transformers' own.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention

from shared.engine.kv_cache import BlockRun, KVCache
from shared.errors import InvariantBroken

ATTENTION_NAME = "handoff_blocks"


class StepAbandoned(Exception):
    """Raised between layers when nobody waits for the step's result any more."""


@dataclass(frozen=True)
class Span:
    """One sequence's tokens in the packed step: rows [row, row + num), positions [start, start + num).

    mask: (num, start + num) bool, True = attend; None for a single token or when start is 0 (plain causal).
    """

    row: int
    num: int
    start: int
    blocks: BlockRun
    mask: Tensor | None


@dataclass(frozen=True)
class StepLayout:
    """Everything attention needs to know about a step. slots: (T,) int64, where each packed token's KV goes.

    on_written: told of each layer whose K and V are in the pool.
    """

    cache: KVCache
    slots: Tensor
    spans: list[Span]
    is_abandoned: Callable[[], bool]
    on_written: Callable[[int], None]

    @staticmethod
    def mask(start: int, num: int, device: torch.device) -> Tensor | None:
        """Causal mask of `num` new positions after `start` old ones, aligned to the lower right."""
        if num == 1 or start == 0:
            return None
        return torch.ones(num, start + num, dtype=torch.bool, device=device).tril_(start)


def block_attention(
    module: nn.Module,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,  # noqa: ARG001 - the interface passes it by position; spans say it all
    scaling: float | None = None,
    *,
    step: StepLayout,
    sliding_window: int | None = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Tensor, None]:
    """transformers' attention signature; `step` comes through as an extra keyword of the model call.

    query: (1, H, T, D); key, value: (1, K, T, D), keys rotated. Returns (1, T, H, D).
    Raises StepAbandoned.
    """
    if sliding_window is not None or softcap is not None:
        raise InvariantBroken("attention with a sliding window or soft cap is not served")
    if step.is_abandoned():
        raise StepAbandoned
    layer = int(module.layer_idx)  # type: ignore[arg-type]
    k_TKD, v_TKD = key[0].transpose(0, 1), value[0].transpose(0, 1)
    step.cache.write(layer, step.slots, k_TKD, v_TKD)
    step.on_written(layer)
    out = torch.empty_like(query[0].transpose(0, 1))
    for span in step.spans:
        rows = slice(span.row, span.row + span.num)
        q = query[:, :, rows]
        if span.start == 0 and span.num > 1:
            attended = scaled_dot_product_attention(
                q, key[:, :, rows], value[:, :, rows], is_causal=True, scale=scaling, enable_gqa=True
            )
        else:
            k_SKD, v_SKD = step.cache.read(layer, span.blocks, span.start + span.num)
            k, v = k_SKD.transpose(0, 1)[None], v_SKD.transpose(0, 1)[None]
            attended = _one_token(q, k, v, scaling) if span.num == 1 else _chunk(q, k, v, span.mask, scaling)
        out[rows] = attended[0].transpose(0, 1)
    return out[None], None


def _one_token(q: Tensor, k: Tensor, v: Tensor, scaling: float | None) -> Tensor:
    """q: (1, H, 1, D). The H/K query heads that share a KV head become its query rows: no copy of K or V."""
    num_heads, num_kv_heads = q.shape[1], k.shape[1]
    grouped = q.reshape(1, num_kv_heads, num_heads // num_kv_heads, q.shape[3])
    return scaled_dot_product_attention(grouped, k, v, scale=scaling).reshape(q.shape)


def _chunk(q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None, scaling: float | None) -> Tensor:
    return scaled_dot_product_attention(q, k, v, attn_mask=mask, scale=scaling, enable_gqa=True)

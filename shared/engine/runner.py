"""Runs one step through transformers' model: packed tokens in, logits of the rows that need them out."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol

import torch
from torch import Tensor
from transformers import AttentionInterface, PreTrainedModel

from shared.engine.attention import ATTENTION_NAME, Span, StepLayout, block_attention
from shared.engine.kv_cache import BlockRun, KVCache
from shared.engine.step import Step


class StepRunner(Protocol):
    """What the engine needs of a model. `close` may free it."""

    def run(self, step: Step) -> Tensor: ...


class Runner:
    """The model, its cache, and the packing of a step.

    Row order: first every decode, then the chunks, each in the step's order.
    """

    def __init__(self, model: PreTrainedModel, cache: KVCache) -> None:
        AttentionInterface.register(ATTENTION_NAME, block_attention)
        model.set_attn_implementation(ATTENTION_NAME)
        self._model = model
        self._cache = cache
        self._device = cache.device

    @torch.inference_mode()
    def run(self, step: Step) -> Tensor:
        """Logits (B, V) float32: one row per decode, then those of each chunk (`Chunk.num_logits`).

        Raises StepAbandoned when every request of the step was cancelled.
        """
        self._cache.copy_blocks(step.copies)
        packed = _Packed(self._cache.shape.block_size, self._device)
        for seq in step.decodes:
            position = seq.num_computed
            packed.add([seq.token_at(position)], position, seq.table, num_logits=1)
        for chunk in step.chunks:
            tokens = chunk.group.token_ids[chunk.start : chunk.end]
            packed.add(tokens, chunk.start, chunk.group.blocks, num_logits=chunk.num_logits)
        keep = packed.logit_rows or [0]
        output = self._model(
            input_ids=self._row(packed.tokens),
            position_ids=self._row(packed.positions),
            use_cache=False,
            logits_to_keep=torch.tensor(keep, device=self._device),
            step=packed.layout(self._cache, lambda: step.is_abandoned, self._on_written(step)),
        )
        logits: Tensor = output.logits[0]
        return logits[: len(packed.logit_rows)].float()

    def _on_written(self, step: Step) -> Callable[[int], None]:
        """Tells of each layer of a prompt's last chunk: what was written may travel while later layers compute.

        Only of a cache in host memory: on a device the work is merely queued when the layer returns.
        """
        ends = [
            (chunk.group.progress, chunk.end)
            for chunk in step.chunks
            if chunk.is_last and chunk.group.progress is not None and self._device.type == "cpu"
        ]

        def on_written(layer: int) -> None:
            for progress, end in ends:
                progress.advance_layers(end, layer + 1)

        return on_written

    def _row(self, values: list[int]) -> Tensor:
        return torch.tensor([values], device=self._device)


class _Packed:
    """Builds the flat lists of one step."""

    def __init__(self, block_size: int, device: torch.device) -> None:
        self._block_size = block_size
        self._device = device
        self.tokens: list[int] = []
        self.positions: list[int] = []
        self.logit_rows: list[int] = []
        self._slots: list[int] = []
        self._spans: list[Span] = []

    def add(self, tokens: list[int], start: int, table: list[int], *, num_logits: int) -> None:
        """Positions [start, start + len(tokens)) of one sequence whose blocks are `table`.

        num_logits: how many of the last rows need logits.
        """
        size, num, end = self._block_size, len(tokens), start + len(tokens)
        row = len(self.tokens)
        self.tokens += tokens
        self.positions += range(start, end)
        self._slots += (table[p // size] * size + p % size for p in range(start, end))
        blocks = BlockRun(table[: -(-end // size)], self._device)
        self._spans.append(Span(row, num, start, blocks, StepLayout.mask(start, num, self._device)))
        self.logit_rows += range(row + num - num_logits, row + num)

    def layout(
        self, cache: KVCache, is_abandoned: Callable[[], bool], on_written: Callable[[int], None]
    ) -> StepLayout:
        """The finished layout."""
        slots = torch.tensor(self._slots, device=self._device)
        return StepLayout(cache, slots, self._spans, is_abandoned, on_written)


def is_out_of_memory(exc: Exception) -> bool:
    """On a CPU torch has no class of its own for it."""
    if isinstance(exc, torch.OutOfMemoryError | MemoryError):
        return True
    return isinstance(exc, RuntimeError) and "DefaultCPUAllocator: can't allocate memory" in str(exc)

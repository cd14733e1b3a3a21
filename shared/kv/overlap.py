"""When KV of the chunk that is being computed may already travel: after which of its layers."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class LayerOverlap:
    """num_groups: parts in which the last chunk's layers are sent, 0 is none. from_tokens: shortest such chunk."""

    num_groups: int
    from_tokens: int

    def marks(self, num_layers: int, num_tokens: int) -> frozenset[int]:
        """The numbers of layers after which the sender is told, for a last chunk of `num_tokens`.

        The last one is `num_layers`: a layer's KV is there before its attention, so more of the step is left.
        """
        groups = min(self.num_groups, num_layers)
        if num_tokens < self.from_tokens:
            return frozenset()
        return frozenset(num_layers * group // groups for group in range(1, groups + 1))

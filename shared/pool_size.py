"""What a pool of KV blocks can hold: the worst case by which requests are admitted, in plain numbers.

The engine admits by it. The router, which is told every worker's numbers, sizes and places by the same.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class PoolSize:
    """num_blocks blocks of block_size tokens."""

    num_blocks: int
    block_size: int

    def blocks_of(self, num_tokens: int) -> int:
        """Blocks of that many tokens in a row, the last one perhaps in part."""
        return -(-num_tokens // self.block_size)

    def worst_case(self, num_tokens: int, num_choices: int, max_new_tokens: int) -> int:
        """Blocks that a prompt of `num_tokens` and all of its answers can ever need together."""
        num_prompt = self.blocks_of(num_tokens)
        # The last sampled token is never run, so it needs no slot.
        grown = self.blocks_of(num_tokens + max(max_new_tokens, 1) - 1) - num_prompt
        copies = self._copies(num_tokens, num_choices) if max_new_tokens > 1 else 0
        return num_prompt + grown * num_choices + copies

    def holds(self, num_tokens: int, num_choices: int, max_new_tokens: int) -> bool:
        """Is there room for that, when nothing else is in the pool?"""
        return self.worst_case(num_tokens, num_choices, max_new_tokens) <= self.num_blocks

    def longest_answer(self, num_tokens: int, num_choices: int) -> int:
        """Tokens that each choice can get when nothing else is in the pool; the first one needs no slot."""
        num_prompt = self.blocks_of(num_tokens)
        free = self.num_blocks - num_prompt - self._copies(num_tokens, num_choices)
        if free < 0:
            return 1
        return (num_prompt + free // num_choices) * self.block_size - num_tokens + 1

    def _copies(self, num_tokens: int, num_choices: int) -> int:
        """Blocks that the choices copy to go on in the prompt's last block, which they share until then."""
        return num_choices - 1 if num_tokens % self.block_size else 0

"""The worst case of a request in blocks, and the longest answer that it leaves room for."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from shared.pool_size import PoolSize


@given(st.integers(1, 40), st.integers(1, 8), st.integers(1, 200), st.integers(1, 9))
def test_the_longest_answer_just_fits(
    num_blocks: int, block_size: int, num_tokens: int, num_choices: int
) -> None:
    """One token more for each choice does not, whatever the sizes; a prompt that fits can have one token."""
    pool = PoolSize(num_blocks, block_size)
    longest = pool.longest_answer(num_tokens, num_choices)

    assert longest >= 1
    assert pool.holds(num_tokens, num_choices, longest) == (pool.blocks_of(num_tokens) <= num_blocks)
    assert not pool.holds(num_tokens, num_choices, longest + 1)


@pytest.mark.parametrize(
    ("num_tokens", "num_choices", "longest"),
    [(8, 1, 9), (8, 2, 5), (8, 3, 1), (7, 3, 2), (7, 4, 1), (16, 9, 1)],
)
def test_choices_share_the_prompt_and_nothing_else(num_tokens: int, num_choices: int, longest: int) -> None:
    """Four blocks of four: what each choice grows into is its own, and so is its copy of a partial block."""
    assert longest == PoolSize(4, 4).longest_answer(num_tokens, num_choices)

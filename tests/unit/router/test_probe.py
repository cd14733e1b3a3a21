"""How long the router's readiness probe is."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from router.probe import probe_lengths


@pytest.mark.parametrize(
    ("max_model_len", "expected"),
    [(2, (1, 1)), (3, (1, 2)), (24, (22, 2)), (41, (39, 2)), (42, (40, 2)), (32768, (40, 2))],
)
def test_a_probe_fits_the_longest_request(max_model_len: int, expected: tuple[int, int]) -> None:
    """It was once 42 tokens in all whatever the workers took, so with fewer nothing ever became ready."""
    assert expected == probe_lengths(max_model_len)


@given(st.integers(2, 100_000))
def test_every_length_that_can_be_set_has_a_probe(max_model_len: int) -> None:
    """Prompt and answer have a token at least and are not too long together."""
    num_prompt, num_answer = probe_lengths(max_model_len)
    assert num_prompt >= 1
    assert num_answer >= 1
    assert num_prompt + num_answer <= max_model_len

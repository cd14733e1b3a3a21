"""What happens to logits before the draw, and the log-probabilities that are reported."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from shared.engine.sampler import LOGPROB_FLOOR
from shared.wire import Logprobs
from tests.unit.shared.engine.sampling import draw, logits, token


def _reported(values: torch.Tensor, **options: Any) -> torch.Tensor:
    """All log-probabilities of a small vocabulary, by token."""
    options = {"num_logprobs": 20, "temperature": 0.0, **options}
    _, reported = draw(values, **options)
    assert reported is not None
    result = torch.full_like(values, LOGPROB_FLOOR)
    for token_id, value in reported.top:
        result[token_id] = value
    return result


def test_logprobs_are_log_softmax_of_the_logits() -> None:
    """Temperature and filters do not change them; the best come first, and the chosen one is among them."""
    values = logits(0)
    wanted = torch.log_softmax(values, 0)
    chosen, reported = draw(values, temperature=1.7, top_k=9, num_logprobs=4, seed=3)
    assert reported is not None
    assert wanted[chosen].item() == pytest.approx(reported.token)
    best = wanted.argsort(descending=True)[:4].tolist()
    assert best == [token_id for token_id, _ in reported.top]
    assert [wanted[t].item() for t in best] == pytest.approx([value for _, value in reported.top])


def test_logprobs_come_in_three_amounts() -> None:
    """None: nothing; 0: the chosen token's alone; k: the k best, at most the vocabulary."""
    values = logits(1, vocab_size=6)
    assert draw(values, temperature=0.0)[1] is None
    _, chosen_only = draw(values, temperature=0.0, num_logprobs=0)
    assert Logprobs(token=float(torch.log_softmax(values, 0).max())) == chosen_only
    _, everything = draw(values, temperature=0.0, num_logprobs=20)
    assert everything is not None
    assert 6 == len(everything.top)


def test_presence_and_frequency_count_outputs_only() -> None:
    """Tokens of the prompt are not counted; presence is once, frequency is per occurrence."""
    values = logits(2, vocab_size=12)
    prompt, outputs = [1, 1, 1, 2], [3, 3, 3, 4]
    adjusted = values.clone()
    adjusted[3] -= 0.5 + 3 * 0.25
    adjusted[4] -= 0.5 + 1 * 0.25
    reported = _reported(values, prompt=prompt, outputs=outputs, presence_penalty=0.5, frequency_penalty=0.25)
    torch.testing.assert_close(reported, torch.log_softmax(adjusted, 0))


def test_the_first_token_knows_no_presence_or_frequency() -> None:
    """Before any output its logprobs are those without a penalty."""
    values = logits(2, vocab_size=12)
    plain = _reported(values, prompt=[5, 5, 5])
    assert torch.equal(plain, _reported(values, prompt=[5, 5, 5], presence_penalty=2, frequency_penalty=2))
    assert not torch.equal(plain, _reported(values, prompt=[5, 5, 5], repetition_penalty=1.3))


def test_repetition_counts_prompt_and_outputs_once() -> None:
    """Positive logits are divided, negative ones multiplied, however often the token was seen."""
    values = torch.tensor([2.0, -1.0, 0.5, 3.0, -2.0])
    adjusted = torch.tensor([2.0 / 1.3, -1.0 * 1.3, 0.5, 3.0, -2.0])
    reported = _reported(values, prompt=[0, 0], outputs=[1, 0], repetition_penalty=1.3)
    torch.testing.assert_close(reported, torch.log_softmax(adjusted, 0))


def test_negative_penalties_and_penalties_below_one_reward() -> None:
    """The signs of OpenAI's and transformers' definitions hold in both directions."""
    values = torch.zeros(5)
    assert 3 == token(values, temperature=0.0, outputs=[3], presence_penalty=-1)
    values = torch.ones(5)
    assert 2 == token(values, temperature=0.0, prompt=[2], repetition_penalty=0.5)


def test_bias_is_added_after_the_penalties() -> None:
    """A biased token that was seen is penalised first."""
    values = torch.tensor([2.0, 1.0, 0.0])
    reported = _reported(values, prompt=[1], repetition_penalty=2.0, logit_bias={"1": 5.0})
    torch.testing.assert_close(reported, torch.log_softmax(torch.tensor([2.0, 5.5, 0.0]), 0))


def test_bias_decides_and_forbids() -> None:
    """+100 wins and -100 is never drawn."""
    values = logits(4)
    best = int(values.argmax())
    assert 9 == token(values, temperature=1.0, logit_bias={"9": 100.0})
    drawn = {token(values, prompt=range(n), logit_bias={str(best): -100.0}) for n in range(1, 40)}
    assert best not in drawn


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_banned_tokens_are_never_chosen(temperature: float) -> None:
    """A ban beats any bias, and its logprob is the floor that JSON can say."""
    values = logits(4, vocab_size=8)
    best = int(values.argmax())
    options: dict[str, Any] = {"temperature": temperature, "banned": [best], "logit_bias": {str(best): 100.0}}
    drawn = {token(values, prompt=range(n), **options) for n in range(1, 40)}
    assert best not in drawn
    reported = _reported(values, **options)
    assert LOGPROB_FLOOR == float(reported[best])


@pytest.mark.parametrize("temperature", [0.0, 1.0])
@pytest.mark.parametrize("penalty", [1e-40, 1e-30, 100.0])
@pytest.mark.parametrize("bias", [-1e300, 1e300, 3e38])
def test_extreme_values_of_a_request_are_no_fault_of_the_engine(
    temperature: float, penalty: float, bias: float
) -> None:
    """What the wire lets through gets a token, and finite logprobs, never a 500."""
    values = logits(6)
    options: dict[str, Any] = {
        "repetition_penalty": penalty,
        "logit_bias": {"1": bias, "5": bias},
        "num_logprobs": 3,
    }
    _, reported = draw(values, prompt=[1, 2, 3], temperature=temperature, **options)
    assert reported is not None
    assert all(math.isfinite(value) for _, value in reported.top)


def test_adjusting_leaves_the_model_s_logits_alone() -> None:
    """The next choice of the same row sees the model's own logits."""
    values = logits(7)
    before = values.clone()
    draw(values, outputs=[1], presence_penalty=1, logit_bias={"2": 3.0}, banned=[4])
    assert torch.equal(before, values)

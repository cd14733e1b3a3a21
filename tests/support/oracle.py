"""The oracle of the truth tests: one process of plain transformers `generate`, greedy, float32."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

Oracle = Callable[[list[int], int], list[int]]


def load_oracle(folder: Path, *, ends: bool, device: str = "cpu") -> Oracle:
    """(prompt ids, number of tokens) -> answer ids, without penalties. ends: whether an end token ends it."""
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32).eval().to(device)  # type: ignore[no-untyped-call]
    no_end = {} if ends else {"eos_token_id": None, "pad_token_id": 0}

    def generate(prompt: list[int], num_tokens: int) -> list[int]:
        ids = torch.tensor([prompt], device=device)
        out = model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=num_tokens,
            do_sample=False,
            temperature=None,
            top_p=None,
            top_k=None,
            repetition_penalty=1.0,
            **no_end,
        )
        answer: list[int] = out[0, len(prompt) :].tolist()
        return answer

    return generate

"""The checkpoint that other tests are built on keeps its promises."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from tokenizers import Tokenizer
from transformers import AutoModelForCausalLM, AutoTokenizer

from shared.models.prepare import ensure_checkpoint
from tests.support.tiny_model import SPARE_ROWS, build_tiny_model


def test_same_seed_gives_the_same_bytes_and_another_seed_other_weights(tmp_path: Path) -> None:
    """Two builds with one seed are equal file by file; another seed changes nothing but the weights."""
    one, same, other = (build_tiny_model(tmp_path / n, seed=s) for n, s in (("a", 1), ("b", 1), ("c", 2)))
    for path in one.iterdir():
        assert path.read_bytes() == (same / path.name).read_bytes()
        assert (path.name == "model.safetensors") == (path.read_bytes() != (other / path.name).read_bytes())


def test_it_is_a_complete_checkpoint_for_us_and_for_transformers(tmp_path: Path) -> None:
    """It is served in place, and transformers finds every weight and no other."""
    folder = build_tiny_model(tmp_path)
    assert folder == ensure_checkpoint(str(folder), "float32", tmp_path / "cache", print)
    loaded: Any = AutoModelForCausalLM.from_pretrained(folder, output_loading_info=True)
    assert not any(loaded[1].values())


def test_greedy_answers_are_varied_and_have_clear_margins(tmp_path: Path) -> None:
    """Different prompts get different, changing answers; the second-best token is never within float noise."""
    folder = build_tiny_model(tmp_path)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    tokenizer = Tokenizer.from_file(str(folder / "tokenizer.json"))
    answers = set()
    for prompt in ("The capital of France is", "Hello 😀", "法国的首都是", "a"):
        ids = torch.tensor([tokenizer.encode(prompt).ids])
        num_prompt = ids.shape[1]
        with torch.inference_mode():
            for _ in range(32):
                ids = torch.cat([ids, model(ids).logits[:, -1].argmax(-1, keepdim=True)], dim=1)
            best, second = model(ids).logits[0, num_prompt - 1 :].topk(2).values.unbind(-1)
        answer = ids[0, num_prompt:].tolist()
        assert len(set(answer)) >= 8
        assert max(answer) < tokenizer.get_vocab_size()
        assert (best - second).min() > 1e-4
        answers.add(tuple(answer))
    assert len(answers) == 4


def test_overrides_change_the_architecture(tmp_path: Path) -> None:
    """Config keys given as arguments are in the config and in the weights' shapes."""
    folder = build_tiny_model(tmp_path, num_hidden_layers=2, hidden_size=32, tie_word_embeddings=False)
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert (2, 32) == (len(model.model.layers), model.model.norm.weight.shape[0])
    assert model.lm_head.weight.data_ptr() != model.model.embed_tokens.weight.data_ptr()
    assert SPARE_ROWS == model.config.vocab_size - len(AutoTokenizer.from_pretrained(folder))


@pytest.mark.parametrize(
    "text",
    ["hello", "Größe 12 l", "你好，世界", "👩‍👩‍👧‍👦🇫🇷", "<|im_start|>user\nhi<|im_end|>\n", "\x00\t \n"],
)
def test_every_text_survives_the_tokenizer(tmp_path: Path, text: str) -> None:
    """Byte-level BPE gives back any text, special tokens included."""
    tokenizer = Tokenizer.from_file(str(build_tiny_model(tmp_path) / "tokenizer.json"))
    assert text == tokenizer.decode(tokenizer.encode(text).ids, skip_special_tokens=False)


def test_the_template_follows_chatml(tmp_path: Path) -> None:
    """A system turn is added if there is none; calls carry JSON arguments; tool answers share one user turn."""
    tokenizer = AutoTokenizer.from_pretrained(build_tiny_model(tmp_path))
    call = {"type": "function", "function": {"name": "f", "arguments": {"a": "ü"}}}
    tools = ({"role": "tool", "content": "1"}, {"role": "tool", "content": "2"})
    turns: Any = [
        {"role": "user", "content": "hi"},
        {"role": "assistant", "content": "", "tool_calls": [call]},
        *tools,
    ]
    text = tokenizer.apply_chat_template(turns, tokenize=False, add_generation_prompt=True)
    assert text == (
        "<|im_start|>system\nYou are a helpful assistant.<|im_end|>\n<|im_start|>user\nhi<|im_end|>\n"
        '<|im_start|>assistant\n<tool_call>\n{"name": "f", "arguments": {"a": "ü"}}\n</tool_call><|im_end|>\n'
        "<|im_start|>user\n<tool_response>\n1\n</tool_response>\n<tool_response>\n2\n</tool_response><|im_end|>\n"
        "<|im_start|>assistant\n"
    )

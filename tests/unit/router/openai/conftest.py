"""A tiny tokenizer with its template, and the facts of a model that is a little larger than it."""

from __future__ import annotations

import pytest

from router.text.template import ChatTemplate
from router.text.tokenizer import TextTokenizer
from shared.models.facts import ModelFacts, SamplingDefaults
from tests.support.tiny_tokenizer import write_tiny_tokenizer


@pytest.fixture(scope="session")
def parts(tmp_path_factory: pytest.TempPathFactory) -> tuple[TextTokenizer, ChatTemplate]:
    """The tiny checkpoint's tokenizer and template."""
    folder = tmp_path_factory.mktemp("tiny-tokenizer")
    write_tiny_tokenizer(folder)
    return TextTokenizer.load(folder), ChatTemplate.load(folder)


@pytest.fixture(scope="session")
def tokenizer(parts: tuple[TextTokenizer, ChatTemplate]) -> TextTokenizer:
    """The tiny tokenizer."""
    return parts[0]


@pytest.fixture(scope="session")
def facts(tokenizer: TextTokenizer) -> ModelFacts:
    """A model with spare rows and with defaults in its generation_config."""
    return ModelFacts(
        architecture="Qwen2ForCausalLM",
        num_layers=1,
        num_heads=1,
        num_kv_heads=1,
        head_dim=8,
        vocab_size=tokenizer.vocab_size + 10,
        max_position_embeddings=4096,
        eos_token_ids=(tokenizer.control_ids["<|im_end|>"],),
        sampling=SamplingDefaults(temperature=0.7, top_p=0.8, top_k=20, repetition_penalty=1.1),
        rope="{}",
    )

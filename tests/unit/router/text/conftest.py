"""One tiny checkpoint, and the real one."""

from __future__ import annotations

from pathlib import Path

import pytest

from router.text.template import ChatTemplate
from router.text.tokenizer import TextTokenizer
from tests.support.real_model import real_checkpoint
from tests.support.tiny_tokenizer import write_tiny_tokenizer


@pytest.fixture(scope="session")
def tiny_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the tiny tokenizer's files."""
    folder = tmp_path_factory.mktemp("tiny-tokenizer")
    write_tiny_tokenizer(folder)
    return folder


@pytest.fixture(scope="session")
def tokenizer(tiny_folder: Path) -> TextTokenizer:
    """The tiny tokenizer."""
    return TextTokenizer.load(tiny_folder)


@pytest.fixture(scope="session")
def template(tiny_folder: Path) -> ChatTemplate:
    """The tiny checkpoint's chat template."""
    return ChatTemplate.load(tiny_folder)


@pytest.fixture(scope="session")
def real_folder() -> Path:
    """The real checkpoint, for tests that are marked `real`."""
    return real_checkpoint()

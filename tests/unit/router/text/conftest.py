"""One tiny checkpoint, and the real tokenizer where a converted checkpoint is at hand."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from router.text.template import ChatTemplate
from router.text.tokenizer import TextTokenizer
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
    """A converted Qwen2.5 checkpoint in the cache folder; skips where there is none."""
    cache = Path(os.environ.get("HANDOFF_CACHE_DIR") or Path.home() / ".cache" / "handoff")
    for path in sorted(cache.rglob("tokenizer.json")):
        if (path.parent / "config.json").is_file():
            return path.parent
    pytest.skip("no converted checkpoint in the cache folder")

"""`make gpu-check`: these tests run on a machine with an NVIDIA GPU only, and say so elsewhere."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.support.tiny_model import build_tiny_model


def pytest_sessionstart() -> None:
    """Without a GPU nothing can be checked, and nothing is reported as passed or skipped."""
    if not torch.cuda.is_available():
        pytest.exit("gpu-check: torch finds no CUDA device here, nothing was checked", returncode=2)


@pytest.fixture(scope="session")
def tiny_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny random Qwen2.5 checkpoint."""
    return build_tiny_model(tmp_path_factory.mktemp("tiny"))

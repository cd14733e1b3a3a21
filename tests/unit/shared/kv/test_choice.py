"""Which transports a setting names."""

from __future__ import annotations

import pytest
from pydantic import TypeAdapter, ValidationError

from shared.kv.transports.choice import DEFAULT, TransportNames

NAMES: TypeAdapter[str] = TypeAdapter(TransportNames)


@pytest.mark.parametrize("names", [DEFAULT, "tcp", "nixl,tcp", "tcp,unix,shm,nixl"])
def test_distinct_names_are_taken(names: str) -> None:
    """In any order."""
    assert names == NAMES.validate_python(names)


@pytest.mark.parametrize("names", ["", "rdma", "tcp,", "tcp,tcp", "shm,unix,shm"])
def test_other_names_are_refused(names: str) -> None:
    """Unknown ones, none, and one that is there twice: it was used once, without a word."""
    with pytest.raises(ValidationError):
        NAMES.validate_python(names)

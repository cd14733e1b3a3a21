"""The targets of `make fuzz`, fed a little here: right inputs, and right ones with a few bytes changed."""

from __future__ import annotations

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from tests.fuzz.targets import TARGETS


@pytest.mark.parametrize("name", TARGETS)
def test_right_input(name: str) -> None:
    """Nothing is wrong with what a fuzzer begins with."""
    target, seed = TARGETS[name]
    target(seed)


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=200, deadline=None)
@given(data=st.data())
def test_changed_input(name: str, data: st.DataObject) -> None:
    """Cut, lengthened, or with some bytes replaced, it is refused in a known way or means the same."""
    target, seed = TARGETS[name]
    changed = bytearray(seed)
    places = st.tuples(st.integers(0, len(seed) - 1), st.integers(0, 255))
    for at, value in data.draw(st.lists(places, max_size=4)):
        changed[at] = value
    end = data.draw(st.one_of(st.just(len(seed)), st.integers(0, len(seed))))
    target(bytes(changed[:end]) + data.draw(st.binary(max_size=8)))


@pytest.mark.parametrize("name", TARGETS)
@settings(max_examples=100, deadline=None)
@given(content=st.binary(max_size=300))
def test_noise(name: str, content: bytes) -> None:
    """Bytes that never were a right input are refused in a known way."""
    TARGETS[name][0](content)

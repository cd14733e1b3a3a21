"""The exception tree: one code per class, statuses as designed, readable messages."""

from __future__ import annotations

import pytest

from shared.errors import (
    InvariantBroken,
    Overloaded,
    PromptTooLong,
    ServingError,
    Unavailable,
    error_table,
)


def _tree(cls: type[ServingError]) -> list[type[ServingError]]:
    return [cls, *(below for child in cls.__subclasses__() for below in _tree(child))]


def test_table_names_every_class_of_the_tree_once() -> None:
    """No class is missing from the wire table, and no code stands for two classes."""
    classes = _tree(ServingError)
    table = error_table()
    assert len(set(classes)) == len(table)
    assert all(table[cls.code] is cls for cls in classes)


def test_every_class_has_an_error_status_and_its_own_docstring() -> None:
    """A class answers with 4xx or 5xx and says what it means."""
    for cls in _tree(ServingError):
        assert 400 <= cls.http_status <= 599, cls
        assert cls.__doc__ != ServingError.__doc__ or cls is ServingError


@pytest.mark.parametrize(
    ("code", "status", "retryable"),
    [
        ("invalid_request", 400, False),
        ("context_length_exceeded", 400, False),
        ("invalid_api_key", 401, False),
        ("model_not_found", 404, False),
        ("request_too_large", 413, False),
        ("overloaded", 429, True),
        ("unavailable", 503, True),
        ("manifest_mismatch", 409, True),
        ("reservation_gone", 410, True),
        ("digest_mismatch", 422, True),
        ("backend_error", 502, True),
        ("backend_timeout", 504, True),
        ("deadline_exceeded", 504, False),
        ("engine_fault", 500, True),
        ("internal_error", 500, False),
    ],
)
def test_codes_keep_their_place_on_the_wire(code: str, status: int, retryable: bool) -> None:
    """Clients and workers of other versions rely on these."""
    cls = error_table()[code]
    assert (status, retryable) == (cls.http_status, cls.retryable)


def test_an_error_carries_its_facts() -> None:
    """Message, field and waiting time are kept, and the message is what `str` shows."""
    exc = Unavailable("No worker is ready.", param="model", retry_after_s=2.5)
    assert ("No worker is ready.", "model", 2.5) == (str(exc), exc.param, exc.retry_after_s)
    assert isinstance(exc, Overloaded)


def test_a_broken_invariant_is_no_user_error() -> None:
    """Nothing that answers ServingErrors may catch it."""
    assert not issubclass(InvariantBroken, ServingError)
    assert issubclass(PromptTooLong, ServingError)


def test_two_classes_with_one_code_break_the_table() -> None:
    """A copied code is found as soon as anybody asks for the table."""

    class Copied(PromptTooLong):
        """Shares its parent's code."""

    with pytest.raises(InvariantBroken, match="share a code"):
        error_table()
    del Copied
    import gc

    gc.collect()
    assert "context_length_exceeded" in error_table()

"""What every part of this package raises when a model cannot be had."""

from __future__ import annotations


class ModelError(Exception):
    """A model cannot be found, fetched, read or stored. The text is one clear line for the operator."""

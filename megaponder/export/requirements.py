"""The optional dependency for reading and writing Hugging Face models."""

from __future__ import annotations

from importlib.util import find_spec

from megaponder.errors import UserError

TESTED = ("4.51", "5.24")
"""The oldest and the newest release of transformers that the tests run exports with."""


def require_transformers(what: str) -> None:
    """UserError naming the extra if transformers is not installed."""
    if find_spec("transformers") is None:
        raise UserError(f'{what} needs transformers, which is not installed; run: pip install "megaponder[export]".')

"""The one error that the registry raises on its own account."""

from __future__ import annotations


class ModelInputError(ValueError):
    """A model name, a model folder or a request that cannot work; the text is one line and says what to do instead."""

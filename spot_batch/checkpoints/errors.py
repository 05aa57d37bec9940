"""What is wrong with a target."""

from __future__ import annotations


class ModelError(ValueError):
    """A target that cannot be used, and why."""

"""Digests of the ranks' batches, as they are posted: of all that a model is given, or of a part."""

from __future__ import annotations

# What they are recorded as.
BATCHES = ("words/batch",)

"""Revisions. A package, because else the wheel would leave them out."""

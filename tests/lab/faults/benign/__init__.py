"""Section 4 of the catalogue: what looks like a fault and is none."""

from tests.lab.faults.benign import ranks, training

__all__ = ["ranks", "training"]

"""Small numbers that stand for large tensors: a digest decides equality, a sketch decides size."""

from rankscope.agent.fingerprint.plan import FingerprintPlan, Prints

__all__ = ["FingerprintPlan", "Prints"]

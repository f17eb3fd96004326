"""Small numbers that stand for large tensors: a digest decides equality, a sketch decides size."""

from rankscope.agent.fingerprint.plan import FingerprintPlan, Pending, Prints

__all__ = ["FingerprintPlan", "Pending", "Prints"]

"""All cases: importing the families registers them, in the order of the catalogue."""

from benchmarks.faultlab import benign, gradients, hardware, start_state
from benchmarks.faultlab.case import REGISTRY

__all__ = ["REGISTRY", "benign", "gradients", "hardware", "start_state"]

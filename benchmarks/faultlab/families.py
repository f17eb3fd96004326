"""All cases: importing the families registers them."""

# In the order of the catalogue.
from benchmarks.faultlab import start_state  # isort: skip
from benchmarks.faultlab import gradients  # isort: skip
from benchmarks.faultlab import precision  # isort: skip
from benchmarks.faultlab import optimizer  # isort: skip
from benchmarks.faultlab import buffers_rng  # isort: skip
from benchmarks.faultlab import data  # isort: skip
from benchmarks.faultlab import hardware  # isort: skip
from benchmarks.faultlab import liveness  # isort: skip
from benchmarks.faultlab import local_sgd  # isort: skip
from benchmarks.faultlab import benign  # isort: skip
from benchmarks.faultlab.case import REGISTRY

__all__ = [
    "REGISTRY",
    "benign",
    "buffers_rng",
    "data",
    "gradients",
    "hardware",
    "liveness",
    "local_sgd",
    "optimizer",
    "precision",
    "start_state",
]

"""All cases: importing the families registers them."""

# In the order of the catalogue.
from tests.lab.faults import (
    benign,
    buffers_rng,
    data,
    gradients,
    hardware,
    liveness,
    local_sgd,
    optimizer,
    precision,
    start_state,
)
from tests.lab.faults.case import REGISTRY

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

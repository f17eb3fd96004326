"""How many samples a step needs."""

from rankscope.server.detectors.batch.noise import BatchNoise

__all__ = ["BatchNoise"]

"""The family of ranks that no longer hold the same: one detector, since one link breaks first."""

from rankscope.server.detectors.desync.detector import Desync

__all__ = ["Desync"]

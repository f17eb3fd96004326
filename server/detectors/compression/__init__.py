"""What compressing gradients costs."""

from rankscope.server.detectors.compression.error import CompressionError

__all__ = ["CompressionError"]

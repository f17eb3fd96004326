"""The family of the throughput: how fast the whole run goes, by its own past."""

from rankscope.server.detectors.throughput.dropped import ThroughputDropped

__all__ = ["ThroughputDropped"]

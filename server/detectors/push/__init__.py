"""The family of gradients that workers push to a parameter server, each at its own pace."""

from rankscope.server.detectors.push.lost import PushLost
from rankscope.server.detectors.push.stale import PushStale

__all__ = ["PushLost", "PushStale"]

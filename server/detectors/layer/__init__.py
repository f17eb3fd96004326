"""Single layers that no longer take part."""

from rankscope.server.detectors.layer.dead import LayerDead

__all__ = ["LayerDead"]

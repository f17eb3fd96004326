"""Small numbers that stand for large tensors: a digest decides equality, a sketch decides size.

`FingerprintPlan` is for torch's tensors and needs torch; `array_plan` is for arrays and does not:
so the names here are loaded on first use.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rankscope.agent.fingerprint.plan import FingerprintPlan as FingerprintPlan
    from rankscope.agent.fingerprint.plan import FingerprintValues as FingerprintValues
    from rankscope.agent.fingerprint.plan import OpenSketches as OpenSketches
    from rankscope.agent.fingerprint.plan import Pending as Pending

__all__ = ["FingerprintPlan", "FingerprintValues", "OpenSketches", "Pending"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        return getattr(import_module("rankscope.agent.fingerprint.plan"), name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")

"""What storage, alignment, detectors, alerts and figures say to each other: plain values. Pure."""

from rankscope.server.window.aligned import (
    Applied,
    Bool,
    Comparison,
    ElementSums,
    Float64,
    Int64,
    LayerNumbers,
    Misreduced,
    Occurrence,
    RankLiveness,
    Reduction,
    Series,
    TensorDifference,
    Window,
    is_wanted,
)
from rankscope.server.window.answers import (
    Alert,
    Check,
    Status,
)
from rankscope.server.window.arrived import (
    Columns,
    FingerprintPart,
    LayerPart,
    LivenessPart,
    NewData,
    joined_fingerprint,
)

__all__ = [
    "Alert",
    "Applied",
    "Bool",
    "Check",
    "Columns",
    "Comparison",
    "ElementSums",
    "Float64",
    "Int64",
    "LayerNumbers",
    "LayerPart",
    "LivenessPart",
    "Misreduced",
    "NewData",
    "Occurrence",
    "FingerprintPart",
    "RankLiveness",
    "Reduction",
    "Series",
    "Status",
    "TensorDifference",
    "Window",
    "is_wanted",
    "joined_fingerprint",
]

"""Plain JSON values for JSON columns: PostgreSQL refuses NaN and infinities there."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from rankscope.agent.wire import number_to_json


def plain(value: Any) -> Any:
    """`value` with non-finite numbers as strings, numpy's types as Python's, keys as text."""
    if isinstance(value, float | np.floating):
        return number_to_json(float(value))
    if isinstance(value, np.integer):
        return int(value)
    if isinstance(value, np.bool_):
        return bool(value)
    if isinstance(value, np.ndarray):
        return [plain(v) for v in value.tolist()]
    if isinstance(value, Mapping):
        return {str(k): plain(v) for k, v in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(v) for v in value]
    # A NUL is text to Python and an error to PostgreSQL.
    return value.replace("\x00", "") if isinstance(value, str) else value

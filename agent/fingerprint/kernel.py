"""The compiled kernel (kernel.c), where the installation could build it.

It is a plain shared library without a line of Python's C interface: one build serves every version
of Python, and `ctypes` releases the GIL while it runs.
"""

from __future__ import annotations

import ctypes
import functools
from pathlib import Path
from typing import Any

# Of `rankscope_version`: a library built from an older kernel.c computes something else.
_VERSION = 2
_BEST = 2


@functools.cache
def load() -> ctypes.CDLL | None:
    """The library, set up to use the best that the CPU has; None where there is none."""
    path = Path(__file__).with_name("_kernel.so")
    try:
        library = ctypes.CDLL(str(path))
        if library.rankscope_version() != _VERSION:
            return None
    except (OSError, AttributeError):
        # Not built (no compiler), or built for another machine: numpy does the same, slower.
        return None
    library.rankscope_choose(_BEST)
    address = ctypes.c_void_p
    library.rankscope_prints.argtypes = [ctypes.c_int64, *[address] * 9]
    library.rankscope_prints.restype = None
    return library


# The numbers of `enum activity` in kernel.c.
NOT_ZERO, INSIDE_ONE, INSIDE_HALF = range(3)


@functools.cache
def activity() -> Any:
    """The function `rankscope_active`; None where there is none."""
    function = getattr(load(), "rankscope_active", None)
    if function is not None:
        address, number = ctypes.c_void_p, ctypes.c_int64
        function.argtypes = [address, *[number] * 4, ctypes.c_float, address]
        function.restype = None
    return function

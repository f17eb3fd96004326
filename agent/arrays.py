"""Arrays of any framework as tensors, without a copy where there need not be one."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch

# A tree of arrays by name, or a function that makes it: called only at steps that are sampled.
Arrays = Mapping[str, Any] | Callable[[], Mapping[str, Any]]

# numpy has no such types of its own: frameworks bring theirs, which torch knows by another name.
_FOREIGN = {
    "bfloat16": (np.int16, torch.bfloat16),
    "float8_e4m3fn": (np.int8, torch.float8_e4m3fn),
    "float8_e5m2": (np.int8, torch.float8_e5m2),
}


def flat(arrays: Mapping[Any, Any], prefix: str = "") -> dict[str, Any]:
    """Nested mappings and sequences of arrays as one mapping of dotted names, in their order.

    Raises:
        TypeError: a name is not text or a number.
    """
    found: dict[str, Any] = {}
    for key, value in arrays.items():
        if not isinstance(key, str | int):
            raise TypeError(f"{prefix}{key!r}: arrays are named by text, not {type(key).__name__}")
        name = f"{prefix}{key}"
        if isinstance(value, Mapping):
            found.update(flat(value, f"{name}."))
        elif isinstance(value, list | tuple):
            found.update(flat(dict(enumerate(value)), f"{name}."))
        else:
            found[name] = value
    return found


def as_tensor(array: Any) -> torch.Tensor:
    """What a numpy, JAX, TensorFlow or torch array holds, in the memory of the host or its device.

    Raises:
        TypeError: it is no array of numbers.
    """
    if isinstance(array, torch.Tensor):
        return array.detach()
    host = np.asarray(array)
    if not host.flags.writeable:
        # torch warns of memory that it could write to and must not; we never write.
        host = _readable(host)
    foreign = _FOREIGN.get(host.dtype.name)
    if foreign is not None:
        return torch.from_numpy(host.view(foreign[0])).view(foreign[1])
    return torch.from_numpy(host)


def _readable(array: np.ndarray[Any, Any]) -> np.ndarray[Any, Any]:
    interface = dict(array.__array_interface__)
    address, _ = interface["data"]
    interface["data"] = (address, False)
    return np.asarray(_Lent(interface, array)).view(array.dtype)


class _Lent:
    """Memory of another array, which it keeps alive."""

    def __init__(self, interface: dict[str, Any], owner: Any) -> None:
        self.__array_interface__ = interface
        self._owner = owner

"""Arrays of any framework under names, as they are given to `monitor.step`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from rankscope.agent.fingerprint.array_plan import ArrayPlan, HostArray, host_array
from rankscope.agent.wire import TensorTable

# A tree of arrays by name, or a function that makes it: called only at steps that are sampled.
Arrays = Mapping[str, Any] | Callable[[], Mapping[str, Any]]


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


def read(arrays: Arrays) -> dict[str, HostArray]:
    """The arrays in the memory of the host, under dotted names."""
    given = arrays() if callable(arrays) else arrays
    return {name: host_array(array) for name, array in flat(given).items()}


@dataclass(frozen=True, slots=True)
class ArrayGroup:
    """Arrays that are fingerprinted together, again and again.

    Attributes:
        name: of the table that their fingerprints refer to.
        table: as it is sent to the server.
    """

    name: str
    table: TensorTable
    plan: ArrayPlan

    def fits(self, arrays: Mapping[str, HostArray]) -> bool:
        """Whether the arrays are still those of the table."""
        return (
            self.table.names == tuple(arrays)
            and self.table.shapes == tuple(a.shape for a in arrays.values())
            and self.table.dtypes == tuple(a.dtype for a in arrays.values())
        )

    @classmethod
    def of(
        cls, name: str, arrays: Mapping[str, HostArray], parts: Sequence[tuple[str, str]] = ()
    ) -> ArrayGroup:
        """The group of some arrays.

        Args:
            name: of its table.
            arrays: by name.
            parts: pattern of names, and which part of the model this rank holds of those; the last
                one that fits counts.
        """
        table = TensorTable(
            names=tuple(arrays),
            shapes=tuple(a.shape for a in arrays.values()),
            dtypes=tuple(a.dtype for a in arrays.values()),
            shards=tuple(
                next((key for like, key in reversed(parts) if fnmatchcase(array, like)), "")
                for array in arrays
            ),
        )
        return cls(name, table, ArrayPlan(tuple(arrays)))

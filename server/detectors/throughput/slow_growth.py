"""What grows all the time: values of a whole run, thinned out evenly."""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from rankscope.server.detectors.mechanisms.statistics import mann_kendall

# Values that are kept at the most, and parts of the run by whose medians it creeps.
_MOST, _PARTS = 512, 8
# Mann-Kendall Z of eight ascending medians is 3.3: seven of them in order have 2.8.
_CREEPS = 2.8


@dataclass(slots=True)
class Course:
    """Follows one value, whose jumps are found elsewhere.

    Attributes:
        values: one of `every`, from the start of the run on.
        seen: how many there were.
    """

    values: list[float] = field(default_factory=list)
    every: int = 1
    seen: int = 0

    def push(self, value: float) -> None:
        """Takes the next value; finite."""
        if self.seen % self.every == 0:
            self.values.append(value)
            if len(self.values) > _MOST:
                self.every *= 2
                del self.values[1::2]
        self.seen += 1

    def creeps(self) -> bool:
        """Whether it has grown in all parts of the run."""
        if len(self.values) < _PARTS:
            return False
        parts = np.array_split(np.array(self.values), _PARTS)
        return mann_kendall([float(np.median(part)) for part in parts]) >= _CREEPS

"""Optimizers whose step reports its end more than once.

Where a user's class calls `super().step()`, the hooks are called for both, if an optimizer of the
class that it derives from has been made in the process, too.
"""

from __future__ import annotations

import weakref
from typing import Any

# One that was missed, because a hook failed, is not yet a habit.
_LEAST = 3


class RepeatedEnds:
    """Distinguishes the first end of a step from those that follow before the next step begins.

    They are learned where starts are reported, too, and known by their number where they are not.
    """

    def __init__(self) -> None:
        # Ends after the first of the last step, of each that had any, and at how many steps.
        self._more: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._steps: weakref.WeakKeyDictionary[Any, int] = weakref.WeakKeyDictionary()
        self._seen = 0
        self._left = 0

    def seen(self, optimizer: Any) -> None:
        """An optimizer has ended its step once more, and not begun another one in between."""
        self._left = 0
        self._seen += 1
        self._more[optimizer] = self._seen
        if self._seen == 1:
            self._steps[optimizer] = self._steps.get(optimizer, 0) + 1

    def ended(self, optimizer: Any) -> Any:
        """It has ended a step: itself if it will not do so again, else None."""
        self._seen = 0
        if not self._more or self._steps.get(optimizer, 0) < _LEAST:
            return optimizer
        self._left = self._more[optimizer]
        return None

    def is_one(self, optimizer: Any) -> bool:
        """Whether an end, whose start was not reported, is of the step that ended last."""
        if not self._left or optimizer not in self._more:
            return False
        self._left -= 1
        return True

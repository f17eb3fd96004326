"""Which step a checkpoint says it is of."""

from __future__ import annotations

import re

import torch

from rankscope.agent.checkpoints.errors import DAMAGED, Unreadable
from rankscope.agent.checkpoints.source import Source

_NAMES = frozenset(
    (
        *("step", "steps", "global_step", "global_steps", "current_step", "num_updates"),
        *("iteration", "iterations", "iter", "epoch", "last_epoch", "batches_trained"),
    )
)
# The counters of an optimizer, one a parameter: `optimizer.state.3.step`.
_OF_STATE = re.compile(r"^(?P<before>(?:.*\.)?state)\..+\.(?P<counter>\w+)$")
_LARGEST = 2**53


def stated(source: Source) -> dict[str, tuple[int, int]]:
    """Counter -> the least and the greatest step that it names.

    Those of an optimizer are one counter (`optimizer.state.*.step`): parameters that were frozen
    for a while have taken fewer steps.
    """
    found: dict[str, tuple[int, int]] = {}
    for name in (*source.values, *source.tensors):
        if name.rpartition(".")[2] not in _NAMES:
            continue
        number = _number(source, name)
        if number is None:
            continue
        of_state = _OF_STATE.match(name)
        key = f"{of_state['before']}.*.{of_state['counter']}" if of_state else name
        least, greatest = found.get(key, (number, number))
        found[key] = (min(least, number), max(greatest, number))
    return found


def _number(source: Source, name: str) -> int | None:
    """The whole number of a name; None where it is something else."""
    value = source.values.get(name)
    stored = source.tensors.get(name)
    if stored is not None:
        # One number, or one a parameter group.
        if torch.Size(stored.shape).numel() != 1:
            return None
        try:
            value = stored.read().item()
        except (Unreadable, *DAMAGED):
            # The comparison says so.
            return None
    if isinstance(value, str) and value.isdecimal() and len(value) < 16:
        # Metadata of safetensors are texts.
        value = int(value)
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    if not abs(value) < _LARGEST or int(value) != value:
        return None
    return int(value)

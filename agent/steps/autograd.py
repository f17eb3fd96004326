"""What autograd says of the graph that a thread makes and walks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

# Which backward pass this thread is in; -1 for none.
graph_task: Callable[[], int] = torch._C._current_graph_task_id
# Number of graph nodes that this thread has made.
nodes_made: Callable[[], int] = torch._C._autograd._get_sequence_nr


def sequence(node: Any) -> int:
    """Distinguishes the nodes of a graph without keeping one alive."""
    number: int = node._sequence_nr()
    return number

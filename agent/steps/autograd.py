"""What autograd says of the graph that a thread makes and walks; what stands for a tensor."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import torch

# Which backward pass this thread is in; -1 for none.
graph_task: Callable[[], int] = torch._C._current_graph_task_id
# Number of graph nodes that this thread has made.
nodes_made: Callable[[], int] = torch._C._autograd._get_sequence_nr
# Of a transformation of `torch.func` (`vmap`, `grad`), under which a tensor stands for something
# else; None outside.
functorch_level: Callable[[], int | None] = torch._C._functorch.maybe_current_level
# Whether `torch.jit.trace` records the calls.
is_tracing: Callable[[], bool] = torch._C._is_tracing


def sequence(node: Any) -> int:
    """Distinguishes the nodes of a graph without keeping one alive."""
    number: int = node._sequence_nr()
    return number


# Beyond so many it is more than arithmetic.
_MOST_NODES = 64


def made_of_earlier(values: Iterable[Any], since: int) -> int:
    """Number of graph nodes made since by arithmetic on what was computed before.

    Args:
        values: of these the tensors count.
        since: what `nodes_made` was then.

    Returns:
        0 where any of it comes from parameters by new nodes alone, as a forward pass does.
    """
    waiting = [v.grad_fn for v in values if isinstance(v, torch.Tensor)]
    found: set[Any] = set()
    while waiting:
        node = waiting.pop()
        # What adds up the gradient of a leaf has the largest number of all.
        if node is None or node in found or sequence(node) < since:
            continue
        if not node.next_functions or hasattr(node, "variable") or len(found) == _MOST_NODES:
            return 0
        found.add(node)
        waiting += [below for below, _ in node.next_functions]
    return len(found)

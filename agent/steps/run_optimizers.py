"""Which optimizers of the process make the steps of the run.

Hooks are called for every optimizer of the process: the one that was attached, the one inside a
wrapper, those that a wrapper calls inside its own step, one that was built in place of the first,
the other player of a game.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from typing import Any

import torch

from rankscope.agent.model.tracked import Role, Tracked, is_inside
from rankscope.agent.steps.autograd import nodes_made
from rankscope.agent.steps.count import StepCount
from rankscope.agent.steps.repeated_ends import RepeatedEnds
from rankscope.agent.steps.turns import Turns

_NONE: frozenset[int] = frozenset()
# Of all monitors of the process.
_all: weakref.WeakSet[RunOptimizers] = weakref.WeakSet()


class RunOptimizers:
    """Recognises the beginnings and the ends of the run's steps among those of all optimizers.

    A step of an optimizer inside the step of another one belongs to the outer one. That is seen
    where the hooks before steps are on (`begins`, `ends`); where they are off (`ends_unannounced`),
    an end is judged by what was seen before.

    Args:
        attached: the optimizer that was given to `attach`.
        tracked: knows which parameters are the run's.
        count: of the run's steps.
        changed: called with the optimizer whose settings and state are the run's from now on, and
            whether it takes the place of the one that was attached for the first time.
        disturbed: called where an optimizer that is not the run's moves its parameters.
        in_turn: called when another one has stepped on a graph of its own, with the positions of
            its parameters among the run's.

    Attributes:
        has_unknown: one has ended a step of the run that was not yet seen to begin one: whether it
            does so inside another's step, and calls closures, is not known.
    """

    def __init__(
        self,
        attached: Any,
        tracked: Tracked,
        count: StepCount,
        *,
        changed: Callable[[Any, bool], None],
        disturbed: Callable[[], None],
        in_turn: Callable[[frozenset[int]], None],
    ) -> None:
        self._attached = attached
        self._tracked = tracked
        self._count = count
        self._changed = changed
        self._disturbed = disturbed
        self._in_turn = in_turn
        self._current = attached  # the last one that was seen to begin a step of the run
        self._outermost: Any = None  # the one that steps now
        self._replaced: weakref.WeakSet[Any] = weakref.WeakSet()
        # Those that were seen to step inside another's step; those that were seen to begin one of
        # the run's.
        self._inner: weakref.WeakSet[Any] = weakref.WeakSet()
        self._begun: weakref.WeakSet[Any] = weakref.WeakSet()
        self._roles: weakref.WeakKeyDictionary[Any, Role] = weakref.WeakKeyDictionary()
        self._repeated = RepeatedEnds()
        self._turns = Turns()
        # id of a parameter -> its gradient, as another optimizer left it when it stepped; and those
        # whose optimizer was seen to step in turns with the run's.
        self._left: dict[int, _Left] = {}
        self._in_turns: set[int] = set()
        self.has_unknown = True
        _all.add(self)

    def begins(self, optimizer: torch.optim.Optimizer) -> bool:
        """One is about to step; whether a step of the run begins to be applied."""
        outermost = self._outermost
        # A step that raised was never seen to end: when its optimizer steps again, that one is
        # over.
        if outermost is not None and outermost is not optimizer:
            self._inner.add(optimizer)
            return False
        if optimizer is not self._attached and self._role(optimizer) is not Role.OWN:
            return False
        self._outermost = optimizer
        if self.has_unknown or optimizer is not self._current:
            self._begun.add(optimizer)
            self.has_unknown = False
            self.belongs_to(optimizer)
        return True

    def ends(self, optimizer: torch.optim.Optimizer) -> bool:
        """One has stepped; whether a step of the run has ended. Its beginning was seen."""
        if optimizer is not self._outermost:
            if self._outermost is None and optimizer is self._current:
                self._repeated.seen(optimizer)
            else:
                self._other_stepped(optimizer)
                self._note_left(optimizer)
            return False
        self._outermost = None
        self._count.optimizer = self._repeated.ended(optimizer)
        return True

    def ends_unannounced(self, optimizer: torch.optim.Optimizer) -> bool:
        """As `ends`, where the hooks before steps are off."""
        if optimizer is self._count.optimizer:
            return True
        if self._is_not_counted(optimizer):
            self._other_stepped(optimizer)
            return False
        if self._repeated.is_one(optimizer):
            return False
        if optimizer not in self._begun:
            self.has_unknown = True
        self._count.optimizer = self._repeated.ended(optimizer)
        return True

    def belongs_to(self, optimizer: Any) -> None:
        """The step in progress is this one's: its settings and state are the step's."""
        if optimizer is self._current:
            return
        self._current = optimizer
        if optimizer is self._attached or is_inside(optimizer, self._attached):
            self._changed(self._attached, False)
            return
        first = optimizer not in self._replaced
        self._replaced.add(optimizer)
        self._changed(optimizer, first)

    def is_attached(self, optimizer: torch.optim.Optimizer) -> bool:
        """Whether it is the one that was given to `attach`, or inside it."""
        return optimizer is self._attached or is_inside(optimizer, self._attached)

    def next_step(self) -> None:
        """The next step is in progress: none of them steps."""
        self._outermost = None

    def take_turns(self, step: int, nodes: int) -> bool:
        """Whether it shows at this step that another one steps in turns with the run's.

        Args:
            step: the one in progress, after one of the run's has ended.
            nodes: of graphs that were made so far.
        """
        return self._turns.met >= 0 and self._turns.own(step, nodes)

    def parameters_changed(self) -> None:
        """Other parameters are the run's from now on."""
        self._roles.clear()
        self._left.clear()
        self._in_turns.clear()

    def not_applied(self) -> frozenset[int]:
        """Positions of parameters whose gradient no optimizer applies in this step or did before.

        Where optimizers step in turns, the backward pass of one leaves gradients in the parameters
        of the other (a generator's, in its discriminator), which are zeroed before that steps.
        Asked when one of the run's steps ends.
        """
        if not self._left:
            return _NONE
        if 0 <= self._turns.met < nodes_made():
            self._in_turns.update(self._left)
        if not self._in_turns:
            return _NONE
        return frozenset(
            row
            for row, parameter in enumerate(self._tracked.group.tensors)
            if id(parameter) in self._in_turns
            if not self._left[id(parameter)].holds(parameter.grad)
        )

    def _role(self, optimizer: torch.optim.Optimizer) -> Role:
        # A second phase of a training has tensors of the first one's, and a run of its own.
        if any(other.is_attached(optimizer) for other in _all if other is not self):
            return Role.OTHER
        role = self._roles.get(optimizer)
        if role is None:
            role = self._roles[optimizer] = self._tracked.role_of(optimizer)
        return role

    def _is_not_counted(self, optimizer: torch.optim.Optimizer) -> bool:
        return optimizer in self._inner or (
            optimizer is not self._attached and self._role(optimizer) is not Role.OWN
        )

    def _other_stepped(self, optimizer: torch.optim.Optimizer) -> None:
        if self._role(optimizer) is not Role.OWN:
            self._turns.other(nodes_made(), self._count.nodes)
        # Inside the step of a wrapper, or none of ours; if it moves parameters that are watched,
        # what changed is no work of ours to judge.
        if self._outermost is None and self._role(optimizer) is Role.OTHER:
            self._disturbed()

    def _note_left(self, optimizer: torch.optim.Optimizer) -> None:
        if self._role(optimizer) is not Role.OTHER:
            return
        moved = {id(p) for group in optimizer.param_groups for p in group["params"]}
        tensors = self._tracked.group.tensors
        rows = frozenset(row for row, p in enumerate(tensors) if id(p) in moved)
        for row in rows:
            self._left[id(tensors[row])] = _Left(tensors[row].grad)
        if rows and self._turns.met >= 0:
            self._in_turn(rows)


class _Left:
    """A gradient as it was, without keeping it alive."""

    __slots__ = ("_gradient", "_version")

    def __init__(self, gradient: torch.Tensor | None) -> None:
        self._gradient = None if gradient is None else weakref.ref(gradient)
        self._version = 0 if gradient is None else gradient._version

    def holds(self, gradient: torch.Tensor | None) -> bool:
        """Whether it is the same one, and nothing has been written to it."""
        if gradient is None or self._gradient is None:
            return gradient is None and self._gradient is None
        return self._gradient() is gradient and gradient._version == self._version

"""The forward passes of the root module at the step in progress: of training, or of what else."""

from __future__ import annotations

import torch

from rankscope.agent.probes import Context
from rankscope.agent.steps.autograd import graph_task


class Passes:
    """Of one monitor.

    Attributes:
        begun: whether one of training was seen.
    """

    __slots__ = ("_bare", "_context", "_in_evaluation_mode", "begun")

    def __init__(self, context: Context) -> None:
        self._context = context
        self.begun = False
        self._in_evaluation_mode = False  # one in evaluation mode, with gradients
        self._bare = 0  # those in training without gradients

    def is_repeated(self, module: torch.nn.Module) -> bool:
        """Whether the pass that begins repeats one of which all has been seen.

        Activation checkpointing runs the model again in the backward pass. Of the older kind this
        is the first pass with gradients.
        """
        if graph_task() != -1:
            if not self._bare:
                return True
            self._bare -= 1
        elif not torch.is_grad_enabled() and self._context.trains(module):
            self._bare += 1
        return False

    def begin_training(self, module: torch.nn.Module) -> bool:
        """Whether the pass that begins is the first one of training at this step."""
        if self.begun or not torch.is_grad_enabled():
            return False
        if not self._context.trains(module):
            self._in_evaluation_mode = True
            return False
        self.begun = True
        return True

    def end_step(self, model: torch.nn.Module) -> None:
        """The step has ended: notes whether the model is trained in evaluation mode."""
        context = self._context
        if not self.begun:
            # The root module's forward was not seen (another module is called, or a compiled one),
            # or that is how it is trained.
            context.in_evaluation_mode = self._in_evaluation_mode
        elif context.in_evaluation_mode:
            context.in_evaluation_mode = not model.training
        self.begun = self._in_evaluation_mode = False
        self._bare = 0

"""Units that do nothing any more: never active, or always at the end of their range."""

from __future__ import annotations

import time
from typing import Any

import numpy as np
import torch
from torch import nn

from rankscope.agent.model_facts import plain_name
from rankscope.agent.probes.arrival import Arrival
from rankscope.agent.probes.base import Context, Probe, StepFacts
from rankscope.agent.probes.module_hook import ModuleHooks, is_compiled
from rankscope.agent.probes.norms import on_one_device
from rankscope.agent.tensors import TensorGroup
from rankscope.agent.wire import Layers, TensorTable

_RELUS = (nn.ReLU, nn.ReLU6)
_SQUASHING = (nn.Tanh, nn.Sigmoid)
_WEIGHTED = (
    nn.Linear,
    nn.Bilinear,
    nn.modules.conv._ConvNd,
    nn.RNNBase,
    nn.MultiheadAttention,
)
# A unit is saturated where its output stays this close to the ends of its range, as a share of
# half the range.
_CLOSE = 0.01
# So many calls of a module during one step are told apart; what comes after them is not looked at.
_MOST_CALLS = 64


class Modules(TensorGroup):
    """Names of modules, in the place of tensors.

    Their table says what class each is, where that of tensors says what dtype.
    """

    def __init__(self, table: str, names: list[str], modules: list[nn.Module]) -> None:
        super().__init__(table, names, ())
        self.classes = tuple(type(m).__name__ for m in modules)

    def described(self) -> TensorTable:
        """The table as it is told to the server; no module has a shape."""
        count = len(self.names)
        return TensorTable(
            names=self.names, shapes=((),) * count, dtypes=self.classes, shards=("",) * count
        )


class Activations(Probe):
    """`dead_units` of ReLU and ReLU6, `saturated_units` of Tanh and Sigmoid modules.

    Tier `full`: two or three operations over each output during sampled steps, and 25 microseconds
    a module. At other steps nothing is hooked.

    A unit is what one output number of the layer before the module is: a feature, or a channel of a
    convolution with all its positions. It is dead where it was 0, saturated where it was within 1 %
    of the ends of its range, for every sample of the step's micro-batches. A module that is called
    several times in one forward pass counts with each call's units.

    Functions (`torch.relu`) and compiled modules have no hooks and are not seen. The modules have a
    table of their own, `activations`; a module of the other kind, and one that was not called, has
    NaN.
    """

    name = "activations"
    sampled = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._hooks = ModuleHooks()
        self._modules: list[nn.Module] = []
        self._channels: list[bool] = []
        self._group: Modules | None = None
        self._calls: list[list[torch.Tensor]] = []
        self._called: list[int] = []
        self._seconds = 0.0
        # Held by the hooks weakly and called through them.
        self.module_called = context.guarded(self.name, self._module_called)

    def start(self, facts: StepFacts) -> None:
        """Finds the modules."""
        if is_compiled(self.context.model):
            return
        names, channels = [], False
        for name, module in self.context.model.named_modules():
            if isinstance(module, _WEIGHTED):
                channels = isinstance(module, nn.modules.conv._ConvNd)
            elif isinstance(module, _RELUS + _SQUASHING):
                names.append(plain_name(name) or type(module).__name__)
                self._modules.append(module)
                self._channels.append(channels)
        if names:
            self._group = Modules("activations", names, self._modules)
            self.context.announce(self._group)

    def forward(self, module: nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        """Puts the hooks in place; the calls of each module are counted from the first again.

        Not before: of a compiled model no forward pass is seen, and to find hooks on its modules
        would have it compiled anew.
        """
        if self._hooks:
            self._called = [0] * len(self._modules)
        elif self.context.full and self._modules and module.training:
            began = time.perf_counter()
            if not is_compiled(self.context.model):
                self._calls = [[] for _ in self._modules]
                self._called = [0] * len(self._modules)
                self._hooks.put_on(self, self._modules)
            self._seconds = time.perf_counter() - began

    @torch.no_grad()
    def _module_called(self, place: int, module: nn.Module, args: Any, output: Any) -> None:
        if not module.training or not isinstance(output, torch.Tensor) or not output.numel():
            return
        began = time.perf_counter()
        call = self._called[place]
        self._called[place] = call + 1
        calls = self._calls[place]
        if call < _MOST_CALLS:
            found = _active(module, output.detach(), channels=self._channels[place])
            if call == len(calls):
                calls.append(found)
            elif calls[call].shape == found.shape:
                calls[call] = calls[call] | found
        self._seconds += time.perf_counter() - began

    @torch.no_grad()
    def after_step(self, facts: StepFacts) -> None:
        """Takes the hooks off and says what they have seen."""
        group = self._group
        if not self._hooks or group is None:
            return
        facts.charge("full", self._seconds)
        with facts.charged("full"):
            self._hooks.take_off()
            calls, self._calls = self._calls, []
            rows = [row for row, seen in enumerate(calls) if seen]
            if not rows:
                return
            units = np.array([sum(active.numel() for active in calls[row]) for row in rows])
            arrival = Arrival(
                torch.cat(on_one_device([active for row in rows for active in calls[row]]))
            )

            def deliver() -> None:
                idle = np.full(len(calls), np.nan)
                active = np.add.reduceat(arrival.result(), np.cumsum(units) - units)
                idle[rows] = 1.0 - active / units
                relu = np.array([isinstance(m, _RELUS) for m in self._modules])
                for metric, mine in (("dead_units", relu), ("saturated_units", ~relu)):
                    values = np.where(mine, idle, np.nan)
                    if not np.isnan(values).all():
                        facts.layers.append(
                            Layers(step=facts.step, table=group.table, metric=metric, values=values)
                        )

            facts.when_ready(arrival, deliver)

    def close(self) -> None:
        """Takes the hooks off."""
        self._hooks.take_off()


def _active(module: nn.Module, output: torch.Tensor, *, channels: bool) -> torch.Tensor:
    """Whether each unit did something for any sample, bool [units]."""
    unit = 1 if channels and output.dim() > 2 else output.dim() - 1
    others = [d for d in range(output.dim()) if d != unit]
    if isinstance(module, _RELUS):
        # Outputs are never negative: where the largest is 0, all are. NaN is not 0.
        return (output.amax(others) if others else output) != 0
    # Where between the ends of the range, -1 to 1.
    inside = output if isinstance(module, nn.Tanh) else output * 2 - 1
    nearest = inside.abs()
    return ~((nearest.amin(others) if others else nearest) > 1 - _CLOSE)

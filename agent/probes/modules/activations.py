"""Units that do nothing any more: never active, or always at the end of their range."""

from __future__ import annotations

import math
import time
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import nn

from rankscope.agent.fingerprint import kernel
from rankscope.agent.fingerprint.values import lies_as_it_reads
from rankscope.agent.model.facts import plain_name
from rankscope.agent.model.tensors import TensorGroup
from rankscope.agent.probes.base import LONGEST_PIECE, Context, Probe, StepFacts, processor_time
from rankscope.agent.probes.modules.module_hook import ModuleHooks
from rankscope.agent.probes.norms import SMALL, on_one_device
from rankscope.agent.probes.numbers_in_transit import Arrival
from rankscope.agent.steps.autograd import functorch_level
from rankscope.agent.wire import Layers, TensorTable

Bool = npt.NDArray[np.bool_]

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
# A unit counts as permanently idle where it was idle for this many consecutive samples. A
# batch of 16 leaves half of the units of a healthy layer idle.
_LASTING = 512
# This number of calls of a module during one step is distinguished; later calls are not sampled.
_MOST_CALLS = 64


class Modules(TensorGroup):
    """Names of modules, in the place of tensors.

    Their table says what class each is, where that of tensors says what dtype.
    """

    def __init__(self, table: str, names: list[str], modules: list[nn.Module]) -> None:
        super().__init__(table, names, ())
        self.classes = tuple(type(m).__name__ for m in modules)

    def described(self) -> TensorTable:
        """The table as it is sent to the server; no module has a shape."""
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

    `dead_units_lasting` and `saturated_units_lasting` are of the sampled steps together, this one
    and those before it back to 512 samples or more (to 1,024 at most, where a step has fewer): what
    single batches leave idle by chance is not in them. Samples are rows or, of tokens, places.

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
        self._samples: list[int] = []
        self._lasting: dict[int, _Lasting] = {}
        self._seconds = 0.0
        # Held by the hooks weakly and called through them.
        self.module_called = context.guarded(self.name, self._module_called)

    def start(self, facts: StepFacts) -> None:
        """Finds the modules."""
        if self.context.modules.is_compiled():
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
        elif self.context.full and self._modules and self.context.trains(module):
            began = processor_time()
            if not self.context.modules.is_compiled():
                self._calls = [[] for _ in self._modules]
                self._called = [0] * len(self._modules)
                self._samples = [0] * len(self._modules)
                self._hooks.put_on(self, self._modules)
            self._seconds = processor_time() - began

    def _module_called(self, place: int, module: nn.Module, args: Any, output: Any) -> None:
        if not (
            self.context.trains(module) and isinstance(output, torch.Tensor) and output.numel()
        ):
            return
        # What is computed here is made of what no gradient is asked of.
        is_large = output.numel() > SMALL
        clock = processor_time if is_large else time.perf_counter
        began = clock()
        call = self._called[place]
        self._called[place] = call + 1
        calls = self._calls[place]
        if call < _MOST_CALLS:
            found = _active(module, output.detach(), channels=self._channels[place])
            if call == 0:
                # Places of one image are alike: it counts as one.
                image = self._channels[place] and output.dim() > 2
                of_unit = output.shape[0] if image else output.numel() // found.numel()
                self._samples[place] += of_unit
            if call == len(calls):
                calls.append(found)
            elif calls[call].shape == found.shape:
                calls[call] = calls[call] | found
        spent = clock() - began
        self._seconds += spent if is_large else min(spent, LONGEST_PIECE)

    def after_step(self, facts: StepFacts) -> None:
        """Takes the hooks off and says what they have seen."""
        group = self._group
        if not self._hooks or group is None:
            return
        facts.charge("full", self._seconds)
        with facts.charged("full"), torch.no_grad():
            self._hooks.take_off()
            calls, self._calls = self._calls, []
            rows = [row for row, seen in enumerate(calls) if seen]
            if not rows:
                return
            units = [sum(active.numel() for active in calls[row]) for row in rows]
            samples = [self._samples[row] for row in rows]
            arrival = Arrival(
                torch.cat(on_one_device([active for row in rows for active in calls[row]]))
            )

            def deliver() -> None:
                idle, lasting = np.full((2, len(calls)), np.nan)
                seen, end = arrival.result() != 0, 0
                for row, size, count in zip(rows, units, samples, strict=True):
                    begin, end = end, end + size
                    active = seen[begin:end]
                    idle[row] = _share_of_idle(active)
                    known = self._lasting.get(row)
                    if known is None or len(known.active) != size:
                        known = self._lasting[row] = _Lasting(active)
                    lasting[row] = known.idle(active, count)
                relu = np.array([isinstance(m, _RELUS) for m in self._modules])
                for metric, shares in (("units", idle), ("units_lasting", lasting)):
                    for what, mine in (("dead", relu), ("saturated", ~relu)):
                        values = np.where(mine, shares, np.nan)
                        if not np.isnan(values).all():
                            name = f"{what}_{metric}"
                            facts.layers.append(
                                Layers(
                                    step=facts.step, table=group.table, metric=name, values=values
                                )
                            )

            facts.when_ready(arrival, deliver)

    def close(self) -> None:
        """Takes the hooks off."""
        self._hooks.remove()


class _Lasting:
    """Which units of a module did something at one of the last sampled steps.

    Attributes:
        active: bool [units], since the last full count.
    """

    __slots__ = ("_before", "_count", "active")

    def __init__(self, like: Bool) -> None:
        self.active = np.zeros_like(like)
        self._before: Bool | None = None
        self._count = 0

    def idle(self, active: Bool, samples: int) -> float:
        """Takes a step's units; share of those that did nothing for so long, NaN if not known."""
        self.active |= active
        self._count += samples
        seen = self.active if self._before is None else self.active | self._before
        if self._count >= _LASTING:
            self._before, self.active, self._count = self.active, np.zeros_like(active), 0
        elif self._before is None:
            return math.nan
        return _share_of_idle(seen)


def _share_of_idle(active: Bool) -> float:
    return 1.0 - int(np.count_nonzero(active)) / len(active)


def _active(module: nn.Module, output: torch.Tensor, *, channels: bool) -> torch.Tensor:
    """Whether each unit did something for any sample, bool [units]."""
    unit = 1 if channels and output.dim() > 2 else output.dim() - 1
    return (
        _active_here(module, output, unit)
        if _lies_here(output)
        else _active_there(module, output, unit)
    )


def _lies_here(output: torch.Tensor) -> bool:
    """Whether the compiled kernel can read an output as it is: in one go, not in five."""
    return (
        type(output) is torch.Tensor
        and output.dtype is torch.float32
        and output.is_cpu
        and output.layout is torch.strided
        and output.dim() > 0
        and lies_as_it_reads(output)
        and functorch_level() is None
        and kernel.activity() is not None
    )


def _active_here(module: nn.Module, output: torch.Tensor, unit: int) -> torch.Tensor:
    shape = output.shape
    units, inner = shape[unit], math.prod(shape[unit + 1 :])
    if isinstance(module, _RELUS):
        which = kernel.NOT_ZERO
    else:
        which = kernel.INSIDE_ONE if isinstance(module, nn.Tanh) else kernel.INSIDE_HALF
    active = torch.empty(units, dtype=torch.bool)
    kernel.activity()(
        output.data_ptr(),
        output.numel() // (units * inner),
        units,
        inner,
        which,
        1 - _CLOSE,
        active.data_ptr(),
    )
    return active


def _active_there(module: nn.Module, output: torch.Tensor, unit: int) -> torch.Tensor:
    """The same by torch's own operations, whatever the output is and wherever it lies."""
    others = [d for d in range(output.dim()) if d != unit]
    if isinstance(module, _RELUS):
        # Outputs are never negative: where the largest is 0, all are. NaN is not 0.
        return (output.amax(others) if others else output) != 0
    # Where between the ends of the range, -1 to 1.
    inside = output if isinstance(module, nn.Tanh) else output * 2 - 1
    nearest = inside.abs()
    return ~((nearest.amin(others) if others else nearest) > 1 - _CLOSE)

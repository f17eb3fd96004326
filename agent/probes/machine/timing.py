"""How long a step takes, what it waits for, and how many samples it moves."""

from __future__ import annotations

import time
from typing import Any

import torch
import torch.distributed as dist
from torch.nn.parallel import DistributedDataParallel

from rankscope.agent.model.facts import core
from rankscope.agent.probes.base import Context, Probe, StepFacts
from rankscope.agent.probes.data.given import batch_size, is_received
from rankscope.agent.process.device_events import AllPassed, Mark
from rankscope.agent.steps.hook_tables import HiddenHook
from rankscope.agent.steps.hooks import RootHook

# Parameters whose gradients are observed to find when the last one was there: the first of the
# model, since gradients come in the opposite order.
_LAST = 8


class Timing(Probe):
    """`step_seconds`, `data_seconds`, `compute_seconds`, `samples_per_second`; `input_received`.

    Costs a clock reading a step and one a first forward pass, at steps where the tier `basic` is
    due.

    A step lasts from the end of the optimizer step before it to its own, so waiting for data and
    for the other ranks is in it. Where steps are left out (tier `basic`), it is the mean since the
    last one. The first step, and the first after an evaluation phase, have no clear beginning.

    `data_seconds` is the part before the step's first forward pass: the loader, the copy to the
    device, and whatever else the trainer does between two steps. `compute_seconds` is the rest,
    waiting in collectives (and for the data of further micro-batches) included. They are known
    where the step before was sampled, too. A step with an evaluation in it has none of these,
    unless the step before had one, too: what comes with every step is a part of it.

    `input_received` is 1 beside `data_seconds` where the first thing that the model is given is a
    tensor whose gradient is wanted, as what a stage of a pipeline receives from the one before:
    the time before the forward pass is then a wait for that rank.

    On CUDA both are times of the device, between events on the stream that the trainer uses, two
    a step: the host gives out work ahead of the device, which starves only where it
    has nothing to do before the forward pass comes. They are known a step or two later, and nothing
    waits for them. `step_seconds` is the host's clock everywhere; so are all three on devices other
    than CUDA, where what a forward pass costs may be waited for by the one after it.
    """

    name = "timing"

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._core = core(context.model)
        self._ended: float | None = None
        self._begun: float | None = None
        self._received = False
        self._last = -1
        self._samples = 0
        self._interrupted = self._was_interrupted = False
        self._unsure = False  # passes with gradients in evaluation mode: perhaps an evaluation
        # On a device: where the step before ended, and where this one begins to compute.
        self._end_mark: Mark | None = None
        self._begin_mark: Mark | None = None

    def forward(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        """Counts samples; an evaluation interrupts the clock."""
        training = self._core.training
        if not torch.is_grad_enabled():
            self._interrupted = self._interrupted or not training
            return
        if not training:
            self._unsure = True
        elif self._unsure:
            self._interrupted, self._unsure = True, False
            self._begun, self._samples = None, 0
        if self._begun is None:
            self._begin_mark = self._mark()
            self._begun = time.perf_counter()
            self._received = is_received(args, kwargs)
        self._samples += batch_size(args, kwargs)

    def interrupted(self) -> None:
        """Something else than training has taken time."""
        self._interrupted = True

    def after_step(self, facts: StepFacts) -> None:
        """Closes the step."""
        now = time.perf_counter()
        step = facts.step
        ended = self._ended
        marks = self._end_mark, self._begin_mark, self._mark()
        # What comes with every step is a part of it.
        if ended is not None and (self._was_interrupted or not self._interrupted):
            scalars = facts.scalars
            steps = step - self._last
            seconds = (now - ended) / steps
            scalars["step_seconds"] = seconds
            if self._begun is None or steps != 1:
                pass  # nothing says where it is split
            elif self._on_device():
                _time_on_device(facts, *marks)
                self._say_received(facts)
            else:
                self._say_received(facts)
                waited = scalars["data_seconds"] = self._begun - ended
                scalars["compute_seconds"] = seconds - waited
            if self._samples and seconds > 0:
                scalars["samples_per_second"] = self._samples / seconds
        self._ended, self._end_mark = now, marks[-1]
        self._begun = self._begin_mark = None
        self._last = step
        self._samples = 0
        self._was_interrupted, self._interrupted, self._unsure = self._interrupted, False, False

    def _say_received(self, facts: StepFacts) -> None:
        if self._received:
            facts.scalars["input_received"] = 1.0

    def _on_device(self) -> bool:
        tensors = self.context.parameters.tensors
        return bool(tensors) and self.context.events.measure(tensors[0])

    def _mark(self) -> Mark | None:
        if not self._on_device():
            return None
        return self.context.events.mark(self.context.parameters.tensors[0])


def _time_on_device(
    facts: StepFacts, before: Mark | None, begun: Mark | None, ended: Mark | None
) -> None:
    """Adds the times of a step once its device has done it; none where a place was not marked."""
    if before is None or begun is None or ended is None:
        return
    last, first, end = before, begun, ended

    def deliver() -> None:
        # Where the host is ahead, the pass began as soon as the device could.
        facts.scalars["data_seconds"] = max(first.seconds_since(last), 0.0)
        facts.scalars["compute_seconds"] = max(end.seconds_since(first), 0.0)

    facts.when_ready(AllPassed(last, first, end), deliver)


class CollectiveWait(Probe):
    """`wait_seconds`: how long a rank waits for the others, of `compute_seconds`.

    Costs 3 microseconds for each of 8 parameters, on CUDA the recording of an event (tier `full`).

    It is the time from the last gradient that this rank has computed to the beginning of the
    optimizer step: the end of the reduction, and what the trainer does in between (clipping, say).
    A rank that waits long is one that others keep waiting. Only on a CPU and on CUDA, and only
    under DistributedDataParallel or FSDP2 or where the trainer itself calls collectives of the
    default process group in that time: wrappers of the optimizer wait in its step. Where the step
    is a closure the optimizer begins before the gradients, and there is no such time either.

    On CUDA it is a time of the device, on the stream on which gradients are computed: collectives
    run beside it, and that stream waits for them before the optimizer's step. It is known a step or
    two later; nothing waits for it.

    Under FSDP2 gradients belong to parameters that are there for the time of a pass only: those of
    the modules that are used first are met as a forward pass begins. It is the wait for the last
    reduction; what ranks wait in the middle of the passes is not in it.
    """

    name = "wait"
    sampled = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._hook = context.guarded(self.name, self._gradient_there)
        self._handles: list[Any] = []
        self._there: float | Mark | None = None
        self._wrapped = _is_wrapped(context.model)
        # Collectives of the default group at the last gradient; with a wrapper they need not be
        # counted.
        self._countable = not self._wrapped and _countable()
        self._collectives = 0
        self._dealt_out = _dealt_out(context.model)
        self._hooked = 0
        self._gathered = context.guarded(self.name, self._hook_parameters)

    def prepare(self, facts: StepFacts) -> None:
        """Puts the hooks for this step in place."""
        if not self.context.full or not (self._wrapped or self._countable or self._dealt_out):
            return
        with facts.charged("full"):
            self._there = None
            if self._dealt_out:
                self._hooked = 0
                # After FSDP's own hook, which was there before and gathers the parameters.
                self._handles = [
                    HiddenHook(m.register_forward_pre_hook(RootHook(self), with_kwargs=True))
                    for m in self._dealt_out
                ]
                return
            self._handles = [
                p.register_hook(self._hook)
                for p in self.context.parameters.tensors[:_LAST]
                if p.requires_grad and self._is_timed(p)
            ]

    def before_step(self, facts: StepFacts) -> None:
        """The reduction is over."""
        if self._handles and self._there is not None:
            counted = self._countable and not self._dealt_out
            if counted and _collectives() == self._collectives:
                return  # they synchronise elsewhere, if they do
            if isinstance(self._there, float):
                facts.scalars["wait_seconds"] = time.perf_counter() - self._there
            else:
                self._wait_on_device(facts, self._there)

    def after_step(self, facts: StepFacts) -> None:
        """Takes the hooks off."""
        if self._handles:
            with facts.charged("full"):
                self.close()

    def close(self) -> None:
        """Takes the hooks off."""
        for handle in self._handles:
            handle.remove()
        self._handles = []

    def root_forward(
        self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> None:
        """A module has gathered its parameters, and is about to use them."""
        self._gathered(module)

    def _hook_parameters(self, module: torch.nn.Module) -> None:
        for parameter in module.parameters():
            if self._hooked == _LAST:
                return
            # Of modules inside that are dealt out by themselves they are not there yet.
            if (
                parameter.requires_grad
                and self._is_timed(parameter)
                and not hasattr(parameter, "placements")
            ):
                self._hooked += 1
                self._handles.append(parameter.register_hook(self._hook))

    def _is_timed(self, parameter: torch.Tensor) -> bool:
        return parameter.is_cpu or self.context.events.measure(parameter)

    def _wait_on_device(self, facts: StepFacts, there: Mark) -> None:
        tensors = self.context.parameters.tensors
        joined = self.context.events.mark(tensors[0]) if tensors else None
        if joined is None:
            return
        here = joined

        def deliver() -> None:
            facts.scalars["wait_seconds"] = max(here.seconds_since(there), 0.0)

        facts.when_ready(AllPassed(there, here), deliver)

    def _gradient_there(self, gradient: torch.Tensor) -> None:
        if not self.context.events.measure(gradient):
            self._there = time.perf_counter()
        elif isinstance(self._there, float | None):
            self._there = self.context.events.mark(gradient)
        else:
            self._there.record()
        if self._countable:
            self._collectives = _collectives()


def _is_wrapped(model: torch.nn.Module) -> bool:
    if not isinstance(model, DistributedDataParallel):
        model = getattr(model, "_orig_mod", model)
    return isinstance(model, DistributedDataParallel) and model.process_group.size() > 1


def _dealt_out(model: torch.nn.Module) -> list[torch.nn.Module]:
    """The first modules whose parameters FSDP2 gathers, on CPUs and on CUDA."""
    found = [m for m in model.modules() if "FSDPModule" in {c.__name__ for c in type(m).__mro__}]
    first = next(model.parameters(), None)
    return found[:_LAST] if first is not None and first.device.type in ("cpu", "cuda") else []


def _countable() -> bool:
    """Whether there are other ranks, and the collectives that join them can be counted."""
    if not (dist.is_available() and dist.is_initialized() and dist.get_world_size() > 1):
        return False
    try:
        _collectives()
    except RuntimeError:  # not every backend counts
        return False
    return True


def _collectives() -> int:
    """How many collectives of the default group this process has begun."""
    group: Any = dist.group.WORLD
    return int(group._get_sequence_number_for_group())

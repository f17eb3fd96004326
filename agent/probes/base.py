"""What a probe is, and what it is given to work with."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Any, ClassVar, Protocol

import torch

from rankscope.agent.model.modules import NamedModules
from rankscope.agent.model.tensors import TensorGroup
from rankscope.agent.process import device_events
from rankscope.agent.schedule import Schedule
from rankscope.agent.steps.count import StepCount
from rankscope.agent.wire import Fingerprint, Layers


class Pending(Protocol):
    """Something under way on a device."""

    def ready(self) -> bool:
        """Whether it can be had without waiting."""


# What a sample costs is counted in processor time of the thread that takes it: what other processes
# take of a busy machine meanwhile is no cost of the agent, and sampling less would not end it.
processor_time = time.thread_time
# To ask for it takes up to 1.5 microseconds where the kernel has to be asked. A piece of work of a
# few microseconds is measured by the clock, and counts for this many seconds at most: what lasts
# longer was interrupted. (2^16 numbers are copied in 50 microseconds, with all caches cold.)
LONGEST_PIECE = 500e-6
_MOST_SKIPS = 64


class Charge:
    """Adds the processor time of a block to one of several sums.

    A generator would take three times as long, and there are seven a step.
    """

    __slots__ = ("_began", "_tier", "_tiers")

    def __init__(self, tiers: dict[str, float], tier: str) -> None:
        self._tiers = tiers
        self._tier = tier
        self._began = processor_time()

    def __enter__(self) -> None:
        return None

    def __exit__(self, *error: object) -> None:
        tiers, tier = self._tiers, self._tier
        tiers[tier] = tiers.get(tier, 0.0) + processor_time() - self._began


class StepFacts:
    """What the probes say of one step, before it is handed to the sender.

    Args:
        step: its number.
        earlier: what of the steps before is still under way on a device.

    Attributes:
        scalars: metric name -> value; a tensor of one element is read without waiting for it.
        digests: stage -> digest of the whole model.
        fingerprints: fingerprints tensor by tensor.
        layers: one number a tensor.
        later: what a device still computes, each with what is to be done once it is ready. It
            may add to scalars, digests, fingerprints and layers then.
        tiers: seconds of processor time spent on each sampling tier.
        shared: what a probe has in hand that one asked after it can use; each probe says in its
            docstring what it leaves here, and under which name.
    """

    __slots__ = (
        "_earlier", "digests", "fingerprints", "later", "layers", "scalars", "shared", "step",
        "tiers",
    )  # fmt: skip

    def __init__(self, step: int, earlier: Collection[object] = ()) -> None:
        self.step = step
        self._earlier = earlier
        self.scalars: dict[str, float | torch.Tensor] = {}
        self.digests: dict[str, int] = {}
        self.fingerprints: list[Fingerprint] = []
        self.layers: list[Layers] = []
        self.later: list[tuple[Pending, Callable[[], None]]] = []
        self.tiers: dict[str, float] = {}
        self.shared: dict[str, Any] = {}

    def charged(self, tier: str) -> Charge:
        """Charges the time of a `with` block to a sampling tier."""
        return Charge(self.tiers, tier)

    def charge(self, tier: str, seconds: float) -> None:
        """Charges time to a sampling tier."""
        self.tiers[tier] = self.tiers.get(tier, 0.0) + seconds

    def when_ready(self, pending: Pending, deliver: Callable[[], None]) -> None:
        """Calls `deliver` as soon as `pending` is ready: at once where it is already.

        Never before what was to be delivered earlier, at this step or at those before: it may need
        what that has found, as a comparison with the step before does.
        """
        if not self.later and not self._earlier and pending.ready():
            deliver()
        else:
            self.later.append((pending, deliver))


class SharedPass:
    """A pass over tensors for one sampling tier, which now and then serves a rarer one as well.

    What it would have cost alone decides how often the first tier is sampled.

    Args:
        tier: the one that it is always made for.
        rarer: the other one.
    """

    def __init__(self, tier: str, rarer: str) -> None:
        self._tier = tier
        self._rarer = rarer
        self._alone = 0.0

    def charge(self, facts: StepFacts, seconds: float, *, both: bool) -> None:
        """Charges the time of a pass, for both tiers or for the first alone."""
        alone = seconds
        if both:
            alone = min(self._alone or seconds / 2, seconds)
            facts.charge(self._rarer, seconds - alone)
        else:
            self._alone = seconds
        facts.charge(self._tier, alone)


class Context:
    """What all probes of a monitor share.

    Attributes:
        model: as it was given to `attach`.
        modules: of the model, under their names.
        optimizer: as it was given to `attach`, or what was built in its place since.
        parameters: the trainable parameters, under their names in the model. Replaced by a new
            group when the model's parameters have changed; never keep it over a step.
        guarded: wraps a callable that the framework calls (a tensor hook, say), so that a fault in
            it disables the probe of that name and nothing else.
        announce: makes a tensor group's table known to the server; before its first fingerprint.
        note: reports something that a person should read beside the run, once.
        late: adds scalars to the step that has just ended: (step, scalars).
        under_way: what is still under way on a device, of all steps.
        event: reports something that happened at a step: (step, kind, text, data), the data being
            JSON-able.
        count: has the number of the step in progress, which is also `step`.
        loss_not_finite: called when a backward pass begins from a loss that is known not to be
            finite: before anything has been updated by it. Only where that is known without waiting
            for a device.
        loss_function_not_finite: called with its name and all it was given when a loss function has
            returned such a loss in training, on a host.
        gradients_not_finite: each is called when a gradient is known not to be finite before an
            optimizer has stepped with it, with whether it is certain that none will (a loss scaler
            skips the step).
        events: marks places in the work of devices, to time it there.
        in_evaluation_mode: training passes are in evaluation mode (dropout and batch norm off).
        aside: seconds that probes spent inside the trainer's calls at the step in progress, beyond
            what they charge to a tier.
        loader: samples in a batch, batches and worker processes of the DataLoader that training
            iterates over; zeros where there is none, or it does not know them.
        not_applied: positions of parameters whose gradient, at the end of the step in progress, is
            one that no optimizer applies, and not the one that another one has applied before
            (`Probe.other_step`).
        alone: neither the step before the one in progress nor the one after it is sampled.
        basic, signals, word, full, state: whether these sampling tiers are due at the step in
            progress. Where one of them is due, so are those before it.
    """

    def __init__(
        self,
        *,
        model: torch.nn.Module,
        optimizer: Any,
        schedule: Schedule,
        parameters: TensorGroup,
        guarded: Callable[[str, Callable[..., Any]], Callable[..., Any]],
        announce: Callable[[TensorGroup], None],
        note: Callable[[str], None],
        count: StepCount,
        event: Callable[[int, str, str, dict[str, Any]], None] = lambda *arguments: None,
        late: Callable[[int, dict[str, float | torch.Tensor]], None] = lambda *arguments: None,
        under_way: Collection[object] = (),
    ) -> None:
        self.model = model
        self.modules = NamedModules(model)
        self.optimizer = optimizer
        self.schedule = schedule
        self.parameters = parameters
        self.guarded = guarded
        self.announce = announce
        self.note = note
        self.event = event
        self.late = late
        self.under_way = under_way
        self.count = count
        self.loss_not_finite: Callable[[], None] = _nothing
        self.loss_function_not_finite: Callable[[str, dict[str, Any]], None] = _nothing
        self._skips = 0
        self.gradients_not_finite: list[Callable[[bool], None]] = []
        self.events = device_events.events()
        self.in_evaluation_mode = False
        self.aside = 0.0
        self.loader = (0, 0, 0)
        self.not_applied: frozenset[int] = frozenset()
        self.alone = False
        self.enter()

    @property
    def step(self) -> int:
        """The step in progress."""
        return self.count.step

    def enter(self) -> None:
        """A new step is in progress: finds out what is due."""
        self.basic, self.signals, self.word, self.full, self.state = self.schedule.plan(self.step)

    @property
    def targets(self) -> bool:
        """Whether the targets of losses are digested at the step in progress.

        Not at a step that is sampled alone: its labels say nothing of an order.
        """
        return self.signals or (self.basic and not self.alone)

    def trains(self, module: torch.nn.Module) -> bool:
        """Whether a pass of the module is one of training, as far as its mode shows."""
        return module.training or self.in_evaluation_mode

    def may_tell_skip(self) -> bool:
        """Whether one more pass that no optimizer stepped with is to be told of.

        The first 64, and then at each doubling: nothing else may happen any more.
        """
        self._skips += 1
        return self._skips <= _MOST_SKIPS or self._skips.bit_count() == 1

    def due(self, tier: str) -> bool:
        """Whether a sampling tier is due at the step in progress."""
        return bool(getattr(self, tier))


def _nothing(*args: Any) -> None:
    return None


class Probe:
    """One family of signals, read at the fixed moments of a step; every moment is optional.

    A moment that a probe does not override costs nothing. The docstring of a probe states what it
    costs.

    Attributes:
        name: as it stands in the report of a fault.
        in_pairs: reports something only of a step beside which another one is sampled: at most
            others it is not asked.
        sampled: `forward`, `before_step` and `after_step` are wanted only at steps at which a tier
            beyond `basic` is due, and at the step after one at which `word` was. Without it they
            are called at steps at which `basic` is due.
    """

    name: ClassVar[str]
    in_pairs: ClassVar[bool] = False
    sampled: ClassVar[bool] = False

    def __init__(self, context: Context) -> None:
        self.context = context

    def start(self, facts: StepFacts) -> None:
        """At attach: what holds before the first step."""

    def prepare(self, facts: StepFacts) -> None:
        """A step begins at which the sampled probes are asked: the time to put hooks in place.

        It may take several passes backward, and its optimizer may never step.
        """

    def not_finite(self, step: int, names: list[str]) -> None:
        """Scalars that probes took at a step are not finite; on a device it is reported later."""

    def forward(self, module: torch.nn.Module, args: tuple[Any, ...], kwargs: Any) -> None:
        """The root module is about to run forward, in training or in evaluation mode."""

    def before_step(self, facts: StepFacts) -> None:
        """The optimizer is about to step (with a closure: before it runs forward)."""

    def other_step(self, facts: StepFacts, rows: frozenset[int]) -> None:
        """Another optimizer has stepped, on a backward pass of its own; only at sampled steps.

        Args:
            rows: positions of its parameters, whose gradients are there as it applied them.
        """

    def after_step(self, facts: StepFacts) -> None:
        """The optimizer has stepped; gradients are still there, as they were applied."""

    def close(self) -> None:
        """Takes back every hook."""

"""Whether the random generator is set back to one seed at every step.

A call of `torch.manual_seed` leaves no trace in the state that can be told from that of a model
that draws nothing. The function is wrapped once a process while a monitor listens, and given back
with the last one.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from typing import Any, Protocol

import torch

from rankscope.agent.guard import process_wide
from rankscope.agent.probes.base import Context, Probe, StepFacts
from rankscope.agent.steps.dynamo import leave_alone
from rankscope.agent.steps.listeners import Listeners, Replacement

SERIES = "rng_repeats"


class Seeding(Probe):
    """`rng_repeats`: for how many steps in a row torch's generator was given the same seed in each.

    Read where the tier `state` is due, once it was seeded after attach; 0 where the step was not
    given the seed of the one before, where nothing was drawn since, or where the state was put back
    (`torch.random.fork_rng`). Costs 2 microseconds each time the generator is seeded, and 20 where
    it is read.
    """

    name = "seeding"
    sampled = True

    def __init__(self, context: Context) -> None:
        super().__init__(context)
        self._seed: int | None = None
        self._step = -1
        self._in_a_row = 0

    def start(self, facts: StepFacts) -> None:
        """From now on every call is seen."""
        listen(self)

    def seeded(self, seed: int) -> None:
        """The generator was given a seed."""
        step = self.context.step
        if seed != self._seed or step > self._step + 1:
            self._in_a_row = 0
        elif step == self._step + 1:
            self._in_a_row += 1
        self._seed, self._step = seed, step

    def after_step(self, facts: StepFacts) -> None:
        """What was drawn since."""
        if not self.context.state or self._seed is None:
            return
        with facts.charged("state"):
            repeats = self._in_a_row if self._step == facts.step else 0
            facts.scalars[SERIES] = float(repeats if repeats and _drawn_from(self._seed) else 0)

    def close(self) -> None:
        """Listens no longer."""
        unlisten(self)


def _drawn_from(seed: int) -> bool:
    """Whether a generator of torch's still has this seed, and numbers were drawn from it."""
    generators = [torch.default_generator]
    if torch.cuda.is_initialized():
        generators.append(torch.cuda.default_generators[torch.cuda.current_device()])
    return any(
        generator.initial_seed() == seed
        and not torch.equal(
            generator.get_state(), torch.Generator(generator.device).manual_seed(seed).get_state()
        )
        for generator in generators
    )


class SeedListener(Protocol):
    """Is notified of each seed that torch is given in the process; must not raise."""

    def seeded(self, seed: int) -> None:
        """`torch.manual_seed` was called."""


def listen(listener: SeedListener) -> None:
    """Notifies `listener` of every seed from now on; it is held weakly."""
    _listeners.add(listener)


def unlisten(listener: SeedListener) -> None:
    """Stops notifying `listener`; with the last one gone, torch is as it was."""
    _listeners.remove(listener)


def _replacements() -> Iterator[Replacement]:
    for owner in (torch, torch.random):
        yield Replacement(owner, "manual_seed", _notifying)


def _notifying(original: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(original)
    def manual_seed(seed: Any) -> Any:
        result = original(seed)
        if not torch.compiler.is_compiling():
            _notify(result)
        return result

    return manual_seed


@process_wide(Seeding.name)
def _notify(generator: torch.Generator) -> None:
    for listener in _listeners:
        listener.seeded(generator.initial_seed())


_listeners: Listeners[SeedListener] = Listeners(_replacements)


leave_alone(_notify)
